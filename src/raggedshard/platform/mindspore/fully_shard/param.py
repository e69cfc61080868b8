"""One sharded parameter: its actual shard, its padded storage and its unsharded form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, ops

from raggedshard.fully_shard.data_parallel import DataParallelRoles, plan_on_mesh
from raggedshard.fully_shard.param import Slot, UnitParam
from raggedshard.fully_shard.sharding import PlacementTypes
from raggedshard.placements import RaggedShard, RaggedStridedShard, Replicate, Shard, StridedShard
from raggedshard.platform.mindspore.device_mesh import DeviceMesh
from raggedshard.platform.mindspore.distribute import deferred_draw
from raggedshard.platform.mindspore.dtensor import DTensor, DTensorSpec, local_of, wrap_local
from raggedshard.platform.mindspore.fully_shard.storage import ShardStorage
from raggedshard.platform.mindspore.private import alias, copy_of, resize_storage, swap_memory
from raggedshard.platform.mindspore.redistribute import to_host

__all__ = ["HSDPParamV2"]

PLACEMENT_TYPES = PlacementTypes(Shard, StridedShard, RaggedShard, RaggedStridedShard)


class HSDPParamV2(UnitParam[DataParallelRoles]):
    """`UnitParam` in MindSpore's tensors, between its sharded and its unsharded form.

    Attributes:
        _sharded_param_data: 1-D, ``padded_sharded_param_size`` elements. For an even parameter it is
            ``sharded_param`` flattened; otherwise a zero-filled storage of which the actual shard is the front.
        unsharded_param: what the cell computes with; its storage is empty while the unit is sharded.
        unsharded_grad: gradients of the unsharded parameter that wait for their reduction.

    Raises:
        NotImplementedError, ValueError: as `fully_shard`.
    """

    def __init__(
        self,
        param: Parameter,
        slots: list[Slot],
        dp_mesh: DataParallelRoles,
        shard_placement_fn: Callable[[Parameter], Any] | None,
        mp_policy: Any,
    ) -> None:
        self._tp_spec: DTensorSpec | None = param._layout if isinstance(param, DTensor) else None
        shape = tuple(param.shape)
        placed = plan_on_mesh(
            slots[0].full_name,
            shape,
            dp_mesh,
            shard_placement_fn(param) if shard_placement_fn is not None else None,
            PLACEMENT_TYPES,
            Replicate(),
            tp_mesh=self._tp_spec.mesh if self._tp_spec else None,
            tp_placements=self._tp_spec.placements if self._tp_spec else (),
            concatenate=DeviceMesh.concatenate,
        )
        super().__init__(slots, dp_mesh, shape, placed, (mp_policy.param_dtype, mp_policy.reduce_dtype))
        self.check_size(local_of(param).shape if isinstance(param, DTensor) else shape)
        self._draw = deferred_draw(param)
        self._spec = DTensorSpec(placed.mesh, placed.placements, shape)
        self.unsharded_grad: Tensor | None = None
        self._sharded_grad: DTensor | None = None
        self._unsharded: Tensor | None = None

    # ---- the sharded form

    def shard(self, param: Parameter) -> None:
        draw = self._draw
        if draw is None:
            actual = self._slice(to_host(local_of(param) if isinstance(param, DTensor) else param))
        else:
            actual = np.zeros(self.sharded_size, np.float32)
        self._storage = ShardStorage(actual, self.layout, param.dtype)
        self.sharded_param: Any = Parameter(
            wrap_local(self._storage.local, self._spec), name=param.name, requires_grad=param.requires_grad
        )
        if draw is not None:
            self.sharded_param.defer(lambda: self._slice(draw()))
        self.sharded_param.is_unit_shard = True
        for slot in self.slots:
            slot.module._params[slot.name] = self.sharded_param
        self._init_dtypes()

    def _slice(self, values: np.ndarray) -> np.ndarray:
        """This rank's actual shard of the logical array."""
        run = self.layout.run(self.dp_mesh.shard_rank)
        if self.layout.lead > 1:
            values = values.reshape(-1, *values.shape[self.layout.lead :])
        return values[(slice(None),) * self.layout.dim + (slice(run.start, run.stop),)]

    def _init_dtypes(self) -> None:
        dtype = self.sharded_param.dtype
        self.choose_dtypes(dtype, dtype in ms.common.dtype.float_type)

    def reset_sharded_param(self) -> None:
        """Called at the first forward and before every all-gather."""
        for slot in self.slots:
            if slot.module._params[slot.name] is not self.sharded_param:
                self._adopt(slot.module._params[slot.name])
        if not self._storage.holds(self.sharded_param):
            local = local_of(self.sharded_param)
            self.check_sharded_size(local.shape)
            self._storage = ShardStorage(to_host(local), self.layout, local.dtype)
            swap_memory(self.sharded_param, self._storage.local)
            self._init_dtypes()
            self._unsharded = None
        self._storage.zero_padding()

    def _adopt(self, other: Any) -> None:
        """A cell got another Parameter in the place of ours: keep ours, take its values."""
        self.sharded_param.set_data(other)
        for slot in self.slots:
            slot.module._params[slot.name] = self.sharded_param

    @property
    def _sharded_param_data(self) -> Tensor:
        return self._storage.flat

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """What this rank gives to the all-gather: 1-D, equally many elements on every rank."""
        return [self._sharded_param_data]

    # ---- the unsharded form

    @property
    def unsharded_param(self) -> Tensor:
        assert self._unsharded is not None, f"{self.name} was never gathered"
        return self._unsharded

    def fill_unsharded(self, chunks: Sequence[Tensor]) -> None:
        """Give the unsharded parameter its memory and its values.

        Args:
            chunks: each rank's padded shard, 1-D; padding is not read.
        """
        unsharded = self._unsharded
        if unsharded is None:
            unsharded = self._unsharded = mint.empty(self.layout.size, dtype=self.param_dtype)
        else:
            resize_storage(unsharded, self.layout.numel)
        if not self.layout.numel:
            return
        if self.layout.dim == 0:
            lengths = [length * self.layout.row_numel for length in self.layout.lengths]
            held = [mint.narrow(chunk, 0, 0, length) for chunk, length in zip(chunks, lengths, strict=True) if length]
            whole = ops.cat(held).reshape(self.layout.size)
        else:
            shards = [chunk.reshape(self.padded_sharded_param_size) for chunk in chunks]
            whole = ops.cat(shards, axis=self.layout.dim)
        unsharded.copy_(whole)

    def free_unsharded(self) -> None:
        if self._unsharded is not None:
            resize_storage(self._unsharded, 0)

    def new_unsharded_alias(self) -> Any:
        """A new leaf on the unsharded parameter's memory; a DTensor where tensor parallelism cut the parameter."""
        leaf = alias(self.unsharded_param)
        # Like the one that the graph knows: a recomputation must save what the forward saved.
        leaf.requires_grad_(self.sharded_param.requires_grad)
        return wrap_local(leaf, self._tp_spec) if self._tp_spec is not None else leaf

    def to_unsharded(self, tensor: Any) -> None:
        """Let the cells compute with ``tensor``. Their ``parameters_and_names`` go on listing the sharded one."""
        for slot in self.slots:
            slot.module.__dict__[slot.name] = tensor

    def to_sharded(self) -> None:
        for slot in self.slots:
            slot.module.__dict__.pop(slot.name, None)

    # ---- gradients

    def add_unsharded_grad(self, grad: Any, accumulate_dtype: Any) -> None:
        """Add a gradient of the unsharded parameter to those that wait for their reduction.

        Args:
            accumulate_dtype: the dtype to keep it in, or ``None`` for the gradient's own.
        """
        if isinstance(grad, DTensor):
            assert self._tp_spec is not None
            grad = local_of(grad.redistribute(self._tp_spec.placements))
        if accumulate_dtype is not None:
            grad = grad.astype(accumulate_dtype)
        self.unsharded_grad = grad if self.unsharded_grad is None else self.unsharded_grad + grad

    def gradient_pieces(self) -> list[list[Tensor]]:
        """The waiting gradient as each rank's padded chunk, in pieces of 1-D tensors; padding is zeros.

        Without a gradient all is zeros.
        """
        layout, grad = self.layout, self.unsharded_grad
        if grad is None:
            zeros = mint.zeros((layout.padded_numel,), dtype=self.reduce_dtype)
            return [[zeros] for _ in layout.lengths]
        if grad.dtype != self.reduce_dtype:
            grad = grad.astype(self.reduce_dtype)
        if layout.dim != 0:
            return [[part.reshape((-1,))] for part in mint.split(grad, layout.dim_shard_size, layout.dim)]
        lengths = [length * layout.row_numel for length in layout.lengths]
        pieces = []
        for own in mint.split(grad.reshape((-1,)), lengths):
            missing = layout.padded_numel - own.size
            pieces.append([own, mint.zeros((missing,), dtype=self.reduce_dtype)] if missing else [own])
        return pieces

    def put_sharded_grad(self, reduced: Tensor) -> None:
        """Keep this rank's reduced gradient, 1-D and without padding, until `take_sharded_grad`."""
        # A new tensor of its own: optimizers and in-place copies do not see where a view begins.
        local = copy_of(reduced.astype(self.orig_dtype).reshape(self.sharded_size))
        grad = wrap_local(local, self._spec)
        self._sharded_grad = grad if self._sharded_grad is None else self._sharded_grad + grad

    def take_sharded_grad(self) -> DTensor | None:
        grad, self._sharded_grad = self._sharded_grad, None
        return grad

    def no_grad_at_all(self) -> DTensor:
        """What ``value_and_grad`` gives for a parameter that the loss does not depend on."""
        return wrap_local(copy_of(mint.zeros(self.sharded_size, dtype=self.orig_dtype)), self._spec)

    def drop_grads(self) -> None:
        self.unsharded_grad = self._sharded_grad = None
