"""`fully_shard` for MindSpore cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mindspore import Parameter

from raggedshard.fully_shard.data_parallel import DataParallelRoles
from raggedshard.fully_shard.param import Slot
from raggedshard.fully_shard.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from raggedshard.fully_shard.units import make_params
from raggedshard.platform.mindspore.collectives import get_world_size, init_process_group
from raggedshard.platform.mindspore.device_mesh import DeviceMesh, init_device_mesh
from raggedshard.platform.mindspore.dtensor import DTensor
from raggedshard.platform.mindspore.fully_shard.cell import CELLS, MindSporeState, begin_forward, mix_in
from raggedshard.platform.mindspore.fully_shard.hooks import attach_hooks
from raggedshard.platform.mindspore.fully_shard.param import HSDPParamV2
from raggedshard.platform.mindspore.fully_shard.param_group import HSDPParamGroup
from raggedshard.platform.mindspore.private import device_type

__all__ = ["fully_shard"]


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[Parameter], Any] | None = None,
    mp_policy: Any = MixedPrecisionPolicy(),
    offload_policy: Any = OffloadPolicy(),
    ignored_params: Iterable[Parameter] | None = None,
) -> Any:
    """Shard a cell's parameters, gradients and optimizer state over the ranks of a mesh, whatever their sizes.

    Apply it bottom-up: each call makes a unit of the parameters that no earlier call took, and a unit's parameters
    are gathered for its forward and backward only. Make the optimizer afterwards, from ``trainable_params()``.

    Args:
        module: the cell, or a list of cells that make one unit. Its initialisation may have been deferred
            (``no_init_parameters`` or the meta device): the values are drawn at the first forward or by
            ``init_parameters_data()`` of the outermost cell, in the order of its parameters.
        mesh: 1-D to shard (FSDP), 2-D ``(replicate, shard)`` for HSDP; ``None`` for all ranks in one shard dim.
        reshard_after_forward: ``True`` frees the parameters between forward and backward, ``False`` keeps them, an
            int keeps a shard for groups of so many neighbouring ranks; ``None`` means ``True``, ``False`` for the root.
        shard_placement_fn: parameter -> ``None`` (dim 0), ``Shard(dim)``, or a ``RaggedShard`` with one's own units.
        mp_policy: dtypes of computation and reduction.
        offload_policy: `CPUOffloadPolicy` is what a CPU does anyway; elsewhere it is not supported.
        ignored_params: parameters to leave alone.

    Returns:
        The same cell; it is an `FSDPModule` now, and its parameters are DTensors of their logical shapes, with
        ``Shard(0)`` where dim 0 divides by the ranks and `RaggedShard` or `RaggedStridedShard` where it does not.

    Raises:
        ValueError: the cell is a container without construct or sharded already; the mesh is not 1-D or 2-D; a
            parameter is a scalar, is tied to one of another unit, or its requested placement does not fit.
        NotImplementedError: ``shard_placement_fn`` asks for a dim other than 0 that does not divide; offloading on a
            device that is no CPU.
    """
    cells = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    if isinstance(offload_policy, CPUOffloadPolicy) and device_type() != "cpu":
        raise NotImplementedError(
            "CPUOffloadPolicy is not supported by the MindSpore backend; leave offload_policy out"
        )
    if mesh is None:
        init_process_group()
        mesh = init_device_mesh(device_type(), (get_world_size(),))
    dp_mesh = DataParallelRoles(mesh)

    def make(param: Parameter, slots: list[Slot]) -> HSDPParamV2:
        return HSDPParamV2(param, slots, dp_mesh, shard_placement_fn, mp_policy)

    params = make_params(cells, CELLS, dp_mesh, reshard_after_forward, ignored_params, _sharded_as, make)
    group = HSDPParamGroup(params, dp_mesh) if params else None
    if group is not None:
        group.accumulate_in_reduce_dtype = mp_policy.reduce_dtype is not None
    state = MindSporeState(cells, group, reshard_after_forward)
    attach_hooks(cells, state, mp_policy, lambda cell: begin_forward(state, cell))
    for cell in cells:
        mix_in(cell, state)
    return module


def _sharded_as(param: Parameter) -> Any:
    """The placements of a parameter that `fully_shard` made; other DTensors are tensor parallelism's."""
    return param.placements if isinstance(param, DTensor) and param.is_unit_shard else None
