"""`fully_shard` and the class that it mixes into modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from raggedshard.fully_shard.param import Slot
from raggedshard.fully_shard.policies import MixedPrecisionPolicy, OffloadPolicy
from raggedshard.fully_shard.units import make_params, own_modules
from raggedshard.platform.torch.dtensor import ShardedDTensor
from raggedshard.platform.torch.fully_shard.hooks import attach_hooks
from raggedshard.platform.torch.fully_shard.mesh import DataParallelMesh, default_mesh
from raggedshard.platform.torch.fully_shard.module import TREE, FSDPModule, TorchState, lazy_init, mix_in
from raggedshard.platform.torch.fully_shard.param import HSDPParamV2
from raggedshard.platform.torch.fully_shard.param_group import HSDPParamGroup
from raggedshard.platform.torch.fully_shard.state_dict import attach_state_dict_hooks

__all__ = ["fully_shard"]


ShardPlacementFn = Callable[[nn.Parameter], Any]
"""Parameter -> ``None`` (dim 0), a ``Shard`` or a ``RaggedShard``."""


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: Any = ...,
    offload_policy: Any = ...,
    ignored_params: set[nn.Parameter] | None = ...,
) -> FSDPModule: ...
@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: Any = ...,
    offload_policy: Any = ...,
    ignored_params: set[nn.Parameter] | None = ...,
) -> list[FSDPModule]: ...
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: Any = MixedPrecisionPolicy(),
    offload_policy: Any = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
) -> Any:
    """Shard a module's parameters, gradients and optimizer state over the ranks of a mesh, whatever their sizes.

    Apply it bottom-up: each call makes a unit of the parameters that no earlier call took, and a unit's parameters
    are gathered for its forward and backward only.

    Args:
        module: the module, or a list of modules that make one unit.
        mesh: 1-D to shard (FSDP), 2-D ``(replicate, shard)`` for HSDP; ``None`` for all ranks in one shard dim.
        reshard_after_forward: ``True`` frees the parameters between forward and backward, ``False`` keeps them, an
            int keeps a shard for groups of so many neighbouring ranks; ``None`` means ``True``, ``False`` for the root.
        shard_placement_fn: parameter -> ``None`` (dim 0), ``Shard(dim)``, or a ``RaggedShard`` with one's own units.
        mp_policy: dtypes of computation and reduction; this package's or torch's class.
        offload_policy: `CPUOffloadPolicy` keeps shards in host memory.
        ignored_params: parameters to leave alone.

    Returns:
        The same module; it is an `FSDPModule` now, and its parameters are DTensors of their logical shapes, with
        ``Shard(0)`` where dim 0 divides by the ranks and `RaggedShard` or `RaggedStridedShard` where it does not.

    Raises:
        ValueError: the module is a container without forward or sharded already; the mesh is not 1-D or 2-D; a
            parameter is a scalar, is tied to one of another unit, or its requested placement does not fit.
        NotImplementedError: ``shard_placement_fn`` asks for a dim other than 0 that does not divide.
    """
    modules = tuple(module) if isinstance(module, list | tuple) else (module,)
    dp_mesh = DataParallelMesh(mesh if mesh is not None else default_mesh())

    def make(param: nn.Parameter, slots: list[Slot]) -> HSDPParamV2:
        return HSDPParamV2(param, slots, dp_mesh, shard_placement_fn, mp_policy, offload_policy)

    params = make_params(modules, TREE, dp_mesh, reshard_after_forward, ignored_params, _sharded_as, make)
    _move_buffers(modules, dp_mesh.device)
    group = HSDPParamGroup(params, dp_mesh) if params else None
    state = TorchState(modules, group, reshard_after_forward)
    if group is not None:
        group.accumulate_in_reduce_dtype = mp_policy.reduce_dtype is not None
    attach_hooks(modules, state, mp_policy, lambda module: lazy_init(state))
    for m in modules:
        mix_in(m, state)
    if group is not None:
        attach_state_dict_hooks(modules, state)
    return module


def _sharded_as(param: nn.Parameter) -> Any:
    """The placements of a parameter that `fully_shard` made; other DTensors are tensor parallelism's."""
    return param.placements if isinstance(param, ShardedDTensor) else None


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    for _, module in own_modules(modules, TREE):
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                module._buffers[name] = buffer.to(device)
