"""One sharded parameter: its actual shard, its padded storage and its unsharded form."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from raggedshard.fully_shard.data_parallel import plan_on_mesh
from raggedshard.fully_shard.param import Slot, UnitParam
from raggedshard.fully_shard.policies import CPUOffloadPolicy
from raggedshard.fully_shard.sharding import PlacementTypes
from raggedshard.platform.torch.autograd import redistribute_sharded
from raggedshard.platform.torch.dtensor import wrap_local
from raggedshard.platform.torch.fully_shard.mesh import DataParallelMesh, concatenate_meshes
from raggedshard.platform.torch.fully_shard.views import full_views
from raggedshard.platform.torch.placements import RaggedShard, RaggedStridedShard

__all__ = ["HSDPParamV2"]

PLACEMENT_TYPES = PlacementTypes(Shard, _StridedShard, RaggedShard, RaggedStridedShard)


def _get(slot: Slot) -> nn.Parameter:
    return slot.module._parameters[slot.name]


def _set(slot: Slot, param: nn.Parameter) -> None:
    # nn.Module.__setattr__ would do the same, behind checks that cost as much as a small kernel.
    slot.module._parameters[slot.name] = param
    if slot.name in slot.module.__dict__:  # some modules cache a flat alias of their weights
        slot.module.__dict__[slot.name] = param


class HSDPParamV2(UnitParam[DataParallelMesh]):
    """`UnitParam` in torch's tensors, between its sharded and its unsharded form.

    Attributes:
        _sharded_param_data: 1-D, ``padded_sharded_param_size`` elements. For an even parameter it is
            ``sharded_param.view(-1)``; otherwise a zero-filled storage of which the actual shard is the front.
        unsharded_param: what the module computes with; its storage is empty while the unit is sharded.
    """

    sharded_param: nn.Parameter

    def __init__(
        self,
        param: nn.Parameter,
        slots: list[Slot],
        dp_mesh: DataParallelMesh,
        shard_placement_fn: Callable[[nn.Parameter], Any] | None,
        mp_policy: Any,
        offload_policy: Any,
    ) -> None:
        self._tp_spec = param._spec if isinstance(param, DTensor) else None
        placed = plan_on_mesh(
            slots[0].full_name,
            param.shape,
            dp_mesh,
            shard_placement_fn(param) if shard_placement_fn is not None else None,
            PLACEMENT_TYPES,
            Replicate(),
            tp_mesh=self._tp_spec.mesh if self._tp_spec is not None else None,
            tp_placements=self._tp_spec.placements if self._tp_spec is not None else (),
            concatenate=concatenate_meshes,
        )
        super().__init__(slots, dp_mesh, param.shape, placed, (mp_policy.param_dtype, mp_policy.reduce_dtype))
        self.check_size(param._local_tensor.shape if isinstance(param, DTensor) else param.shape)
        self.offload_to_cpu = isinstance(offload_policy, CPUOffloadPolicy) or hasattr(offload_policy, "pin_memory")
        self.pin_memory = self.offload_to_cpu and offload_policy.pin_memory
        self._contiguous_stride = _contiguous_stride(param.shape)
        self._unsharded_param: nn.Parameter | None = None
        self._unsharded_flat: torch.Tensor | None = None
        self.unsharded_grad: torch.Tensor | None = None

    @property
    def is_meta(self) -> bool:
        return self.sharded_param.is_meta

    @property
    def sharded_size(self) -> torch.Size:
        return torch.Size(super().sharded_size)

    @property
    def padded_sharded_param_size(self) -> torch.Size:
        return torch.Size(super().padded_sharded_param_size)

    # ---- the sharded form

    def shard(self, param: nn.Parameter) -> None:
        data = param.detach()
        if isinstance(data, DTensor):
            data = data._local_tensor
        device = torch.device("cpu") if self.offload_to_cpu else self.dp_mesh.device
        if not data.is_meta:
            data = data.to(device)
        self._sharded_param_data, local = self._make_storage(self._slice(data))
        self._own_local = local
        self.sharded_param = nn.Parameter(self.as_sharded_dtensor(local), requires_grad=param.requires_grad)
        self._set_slots(self.sharded_param)
        self._init_dtypes()

    def _slice(self, data: torch.Tensor) -> torch.Tensor:
        """This rank's actual shard of the logical tensor."""
        run = self.layout.run(self.dp_mesh.shard_rank)
        if self.layout.lead > 1:
            data = data.flatten(0, self.layout.lead - 1)
        return data.narrow(self.layout.dim, run.start, run.length)

    def _make_storage(self, actual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(_sharded_param_data, local shard)`` with the values of ``actual``, in memory of their own."""
        if self.layout.is_even:
            local = torch.empty(actual.shape, dtype=actual.dtype, device=actual.device, pin_memory=self._pins(actual))
            local.copy_(actual)
            return local.view(-1), local
        padded = torch.zeros(
            self.padded_sharded_param_size, dtype=actual.dtype, device=actual.device, pin_memory=self._pins(actual)
        )
        local = padded.narrow(0, 0, actual.shape[0])
        local.copy_(actual)
        return padded.view(-1), local

    def _pins(self, actual: torch.Tensor) -> bool:
        return self.pin_memory and actual.device.type == "cpu" and torch.accelerator.is_available()

    def as_sharded_dtensor(self, local: torch.Tensor) -> DTensor:
        """This rank's ``local`` of shape ``sharded_size`` as a DTensor with the parameter's placements."""
        return wrap_local(local, self._spmd_mesh, self._spmd_placements, self._orig_size, self._contiguous_stride)

    @property
    def _local(self) -> torch.Tensor:
        return cast(DTensor, self.sharded_param)._local_tensor

    def _init_dtypes(self) -> None:
        self.choose_dtypes(self.sharded_param.dtype, self.sharded_param.dtype.is_floating_point)

    def reset_sharded_param(self) -> None:
        """Called at the first forward and after ``to_empty``, dtype or device casts and ``load_state_dict``."""
        self._adopt_replacement()
        local = self._local
        if local.is_meta:
            return
        if self._is_own_storage(local):
            self._own_local = local
            for view in self._padding_views():
                view.zero_()
            return
        self.check_sharded_size(local.shape)
        with torch.inference_mode(False), torch.no_grad():
            self._sharded_param_data, self._own_local = self._make_storage(local.detach())
        cast(Any, self.sharded_param)._local_tensor = self._own_local
        self._init_dtypes()
        self._unsharded_param = self._unsharded_flat = None

    def restore_storage(self) -> None:
        """`reset_sharded_param` if a method of a module that is no unit itself replaced the parameter or its local."""
        if self._local is not self._own_local or any(_get(slot) is not self.sharded_param for slot in self.slots):
            self.reset_sharded_param()

    def _adopt_replacement(self) -> None:
        """A module slot that got another Parameter (``load_state_dict(assign=True)``): keep ours, take its contents."""
        for slot in self.slots:
            current = _get(slot)
            if current is not self.sharded_param and current is not self._unsharded_param:
                torch.utils.swap_tensors(self.sharded_param, current)
                self._set_slots(self.sharded_param)
                return

    def _is_own_storage(self, local: torch.Tensor) -> bool:
        data = self._sharded_param_data
        return (
            not data.is_meta
            and local.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
            and local.storage_offset() == data.storage_offset()
            and local.dtype == data.dtype
            and local.device == data.device
            and local.is_contiguous()
        )

    def _padding_views(self) -> list[torch.Tensor]:
        """The part of this rank's storage that is padding; empty for a rank without any."""
        start = self.layout.lengths[self.dp_mesh.shard_rank] * self.layout.row_numel
        # Of a detached alias: writing padding is no change of the values, which would be one on some ranks only.
        return [self._sharded_param_data.data[start:]] if start < self.layout.padded_numel else []

    def shard_value(self, value: torch.Tensor) -> DTensor:
        """A value of the logical shape with the parameter's placements.

        Args:
            value: a full tensor, which is cut without communication, or a DTensor of any placements.

        Raises:
            ValueError: a DTensor on another mesh.
        """
        if isinstance(value, DTensor):
            if value.device_mesh != self._spmd_mesh:
                raise ValueError(
                    f"parameter '{self.name}' of shape {tuple(self._orig_size)}: its new value is on "
                    f"{value.device_mesh}, the parameter on {self._spmd_mesh}; load a full tensor or one on this mesh"
                )
            if value.placements == self._spmd_placements:
                return value
            return redistribute_sharded(value, None, self._spmd_placements)
        if self._tp_spec is not None:
            tp = distribute_tensor(value, self._tp_spec.mesh, self._tp_spec.placements, src_data_rank=None)
            value = tp._local_tensor
        device = torch.device("cpu") if self.offload_to_cpu else self.dp_mesh.device
        return self.as_sharded_dtensor(self._slice(value.detach()).to(device).contiguous())

    @property
    def all_gather_inputs(self) -> list[torch.Tensor]:
        """What this rank gives to the all-gather: 1-D, equally many elements on every rank."""
        return [self._sharded_param_data]

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever the sharded values are written to."""
        return self.sharded_param._version, self._local._version

    # ---- the unsharded form

    @property
    def unsharded_param(self) -> nn.Parameter:
        assert self._unsharded_param is not None, f"{self.name} was never gathered"
        return self._unsharded_param

    def aliases_shard(self) -> bool:
        """One rank holds everything and computes in the same dtype: the shard is the unsharded parameter."""
        return (
            self.dp_mesh.shard_world_size == 1
            and self.param_dtype == self.orig_dtype
            and self._sharded_param_data.device == self.dp_mesh.device
        )

    def alloc_unsharded(self) -> None:
        """Give the unsharded parameter its memory, creating it the first time."""
        if self._unsharded_flat is None:
            with torch.inference_mode(False), torch.no_grad():
                self._init_unsharded_param()
        assert self._unsharded_flat is not None
        if not self.aliases_shard():
            storage = self._unsharded_flat.untyped_storage()
            storage.resize_(self.layout.numel * self.param_dtype.itemsize)
        self.follow_requires_grad()

    def follow_requires_grad(self) -> None:
        """The user freezes and unfreezes the sharded parameter."""
        if self._unsharded_param is not None:
            self._unsharded_param.requires_grad_(self.sharded_param.requires_grad)

    def _init_unsharded_param(self) -> None:
        if self.aliases_shard():
            flat = self._sharded_param_data
        else:
            flat = torch.empty(self.layout.numel, dtype=self.param_dtype, device=self.dp_mesh.device)
        self._unsharded_flat = flat
        data = flat.view(self.layout.size)
        if self._tp_spec is not None:
            data = DTensor.from_local(
                data,
                self._tp_spec.mesh,
                self._tp_spec.placements,
                run_check=False,
                shape=self._orig_size,
                stride=self._contiguous_stride,
            )
        self._unsharded_param = nn.Parameter(data, requires_grad=self.sharded_param.requires_grad)
        # A detached alias has a version counter of its own, so a refill before backward does not look like a
        # change of the saved weights.
        self._unsharded_views = full_views(flat.data.view(self.layout.size), self.layout)

    def unsharded_views(self) -> list[torch.Tensor]:
        """Where an all-gather's elements go, segment by segment."""
        return self._unsharded_views

    def free_unsharded(self) -> None:
        if self._unsharded_flat is not None and not self.aliases_shard():
            self._unsharded_flat.untyped_storage().resize_(0)

    def to_unsharded(self) -> None:
        self._set_slots(self.unsharded_param)

    def to_sharded(self) -> None:
        self._set_slots(self.sharded_param)

    def _set_slots(self, param: nn.Parameter) -> None:
        for slot in self.slots:
            _set(slot, param)

    # ---- gradients

    def take_unsharded_grad(self, accumulate_dtype: torch.dtype | None = None) -> None:
        """Move the gradient that autograd left on the unsharded parameter here, adding to what is here already.

        Args:
            accumulate_dtype: the dtype to keep it in, or ``None`` for the gradient's own.
        """
        if self._unsharded_param is None or self._unsharded_param.grad is None:
            return
        grad = self._unsharded_param.grad
        self._unsharded_param.grad = None
        if isinstance(grad, DTensor):
            assert self._tp_spec is not None
            if grad.placements != self._tp_spec.placements:
                grad = grad.redistribute(self._tp_spec.mesh, self._tp_spec.placements)
            grad = grad._local_tensor
        if accumulate_dtype is not None:
            grad = grad.to(accumulate_dtype)
        self.unsharded_grad = grad if self.unsharded_grad is None else self.unsharded_grad + grad

    def drop_unsharded_grad(self) -> None:
        """Forget the gradient that autograd left on the unsharded parameter."""
        if self._unsharded_param is not None:
            self._unsharded_param.grad = None

    def gradient_views(self) -> list[torch.Tensor]:
        """The taken gradient as `chunk_views` want it, segment by segment."""
        assert self.unsharded_grad is not None
        return full_views(self.unsharded_grad.contiguous(), self.layout)

    def accumulate_sharded_grad(self, local: torch.Tensor) -> None:
        """Add this rank's reduced gradient, shape ``sharded_size``, to ``sharded_param.grad``."""
        device = torch.device("cpu") if self.offload_to_cpu else local.device
        local = local.to(device=device, dtype=self.orig_dtype)
        if self.sharded_param.grad is None:
            self.sharded_param.grad = cast(torch.Tensor, self.as_sharded_dtensor(local))
        else:
            cast(DTensor, self.sharded_param.grad)._local_tensor.add_(local)
        hooks = getattr(self.sharded_param, "_post_accumulate_grad_hooks", None) or {}
        for hook in hooks.values():
            hook(self.sharded_param)


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    sizes = [max(size, 1) for size in shape[1:]]
    return tuple(itertools.accumulate(reversed(sizes), lambda a, b: a * b, initial=1))[::-1]
