"""Layout changes that gradients flow through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from raggedshard.placements import check_placements
from raggedshard.platform.torch.dtensor import ShardedDTensor, wrap_local
from raggedshard.platform.torch.private import StridedShard
from raggedshard.platform.torch.redistribute import redistribute_local
from raggedshard.platform.torch.shards import dense_stride, local_of, shape_on

__all__ = ["FromLocal", "ToLocal", "normalize", "redistribute_sharded"]


def normalize(placements: Sequence[Placement], ndim: int) -> tuple[Placement, ...]:
    """Placements with tensor dims counted from the front."""

    def one(placement: Any) -> Placement:
        dim = getattr(placement, "dim", 0)
        if dim >= 0:
            return placement
        split = getattr(placement, "split_factor", None)
        return type(placement)(dim + ndim) if split is None else StridedShard(dim + ndim, split_factor=split)

    return tuple(one(placement) for placement in placements)


def gradient_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The gradient of a sum's terms is the whole gradient for each term: Replicate in place of Partial."""
    return tuple(Replicate() if p.is_partial() else p for p in placements)


def redistribute_sharded(
    tensor: DTensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> ShardedDTensor:
    """`ShardedDTensor.redistribute`, of any DTensor."""
    if mesh is not None and mesh != tensor.device_mesh:
        raise ValueError(f"cannot redistribute from {tensor.device_mesh} to another mesh, {mesh}")
    if placements is None:
        raise ValueError("redistribute needs placements")
    target = normalize(placements, tensor.ndim)
    check_placements(tuple(tensor.shape), tuple(tensor.device_mesh.shape), target)
    dtypes = (forward_dtype or tensor.dtype, backward_dtype or tensor.dtype)
    return _Redistribute.apply(tensor, target, *dtypes, tensor.dtype)  # type: ignore[return-value]


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        tensor: DTensor,
        placements: tuple[Placement, ...],
        dtype: torch.dtype,
        backward_dtype: torch.dtype,
        input_dtype: torch.dtype,
    ) -> ShardedDTensor:
        ctx.placements, ctx.backward_dtype, ctx.input_dtype = tensor.placements, backward_dtype, input_dtype
        mesh = tensor.device_mesh
        local = redistribute_local(local_of(tensor).to(dtype), tensor.shape, mesh, tensor.placements, placements)
        return wrap_local(local, mesh, placements, tensor.shape, _stride_of(tensor))

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:  # type: ignore[override]
        target = gradient_placements(ctx.placements)
        grad = _Redistribute.apply(grad, target, ctx.backward_dtype, grad.dtype, grad.dtype)  # type: ignore
        return grad.to(ctx.input_dtype), None, None, None, None


class ToLocal(torch.autograd.Function):
    """The local tensor; its gradient becomes a tensor of ``grad_placements``."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, tensor: DTensor, grad_placements: Sequence[Placement] | None
    ) -> torch.Tensor:
        placements = gradient_placements(tensor.placements) if grad_placements is None else grad_placements
        ctx.layout = (tensor.device_mesh, normalize(placements, tensor.ndim), tensor.shape, _stride_of(tensor))
        ctx.set_materialize_grads(False)
        local = local_of(tensor)
        return local.view_as(local)  # a new object: autograd attaches its state to it

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:  # type: ignore[override]
        if grad is None:
            return None, None
        return FromLocal.apply(grad, *ctx.layout), None


class FromLocal(torch.autograd.Function):
    """A tensor around a local one; the gradient is brought to the same placements and made local.

    ValueError when the local shape does not fit.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        local: torch.Tensor,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        shape: torch.Size,
        stride: tuple[int, ...],
    ) -> ShardedDTensor:
        expected = shape_on(mesh, shape, placements)
        if tuple(local.shape) != expected:
            raise ValueError(
                f"a local tensor of shape {tuple(local.shape)} does not fit: placements {placements} of the global "
                f"shape {tuple(shape)} give this rank {expected}"
            )
        ctx.placements = gradient_placements(placements)
        ctx.set_materialize_grads(False)
        return wrap_local(local.detach(), mesh, placements, shape, stride)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> Any:  # type: ignore[override]
        if grad is None:
            return None, None, None, None, None
        return redistribute_sharded(grad, None, ctx.placements).to_local(), None, None, None, None


def _stride_of(tensor: torch.Tensor) -> tuple[int, ...]:
    return dense_stride(tuple(tensor.shape), tuple(tensor.stride()))
