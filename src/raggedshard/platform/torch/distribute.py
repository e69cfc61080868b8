"""Making sharded tensors: from local tensors, from a global tensor, from a tensor of another layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import tensor as torch_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from raggedshard.placements import check_placements
from raggedshard.platform.torch.autograd import FromLocal, normalize, redistribute_sharded
from raggedshard.platform.torch.collectives import broadcast
from raggedshard.platform.torch.dtensor import ShardedDTensor, wrap_local
from raggedshard.platform.torch.shards import has_ragged, part_of

__all__ = ["distribute_tensor", "from_local", "redistribute"]


def from_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    run_check: bool = False,
) -> DTensor:
    """A DTensor whose part on this rank is ``local``. Differentiable.

    Args:
        local: this rank's part, of any dtype; may have no elements.
        placements: with a ragged one the result is a `ShardedDTensor`; without, torch's ``from_local`` is called.
        shape: the global shape; needed for ragged placements, from which it cannot be told.
        stride: the global stride; that of a contiguous tensor by default.
        run_check: give all ranks of a Replicate dim the values of its first rank.

    Raises:
        ValueError: no shape, placements that do not fit it, or a local tensor of another shape than they give.
    """
    if not has_ragged(placements):
        size = None if shape is None else torch.Size(shape)
        if size is not None and stride is None:
            stride = _contiguous_stride(size)
        stride = None if stride is None else tuple(stride)
        return DTensor.from_local(local, mesh, placements, run_check=run_check, shape=size, stride=stride)
    if shape is None:
        raise ValueError(f"from_local needs the global shape: placements {tuple(placements)} do not tell it")
    size = torch.Size(shape)
    placements = normalize(placements, len(size))
    check_placements(tuple(size), tuple(mesh.shape), placements)
    if run_check:
        local = _first_replicas(local, mesh, placements)
    return FromLocal.apply(  # type: ignore[return-value]
        local, mesh, placements, size, tuple(stride) if stride is not None else _contiguous_stride(size)
    )


def distribute_tensor(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Shard a global tensor.

    Args:
        tensor: a leaf of the global shape, on every rank.
        placements: with a ragged one the result is a `ShardedDTensor`; without, torch's function is called.
        src_data_rank: the coordinate, along every mesh dim, of the rank whose values count; ``None``: each rank keeps
            its part of its own tensor, without communication.

    Raises:
        ValueError: placements that do not fit the shape, or a DTensor of another mesh or other placements.
        RuntimeError: ``tensor`` is no leaf.
    """
    if not has_ragged(placements):
        return torch_tensor.distribute_tensor(tensor, mesh, placements, src_data_rank=src_data_rank)
    if not tensor.is_leaf:
        raise RuntimeError("distribute_tensor takes a leaf tensor; use from_local or redistribute within a graph")
    placements = normalize(placements, tensor.ndim)
    check_placements(tuple(tensor.shape), tuple(mesh.shape), placements)
    if isinstance(tensor, DTensor):
        if tensor.device_mesh != mesh or tensor.placements != placements:
            raise ValueError(
                f"the tensor is distributed already, as {tensor.placements} on {tensor.device_mesh}: "
                f"use redistribute for {placements}"
            )
        return tensor
    full = tensor.detach()
    if mesh.device_type != full.device.type and not full.is_meta:
        full = full.to(mesh.device_type)
    if src_data_rank is not None and not full.is_meta:
        full = full.clone(memory_format=torch.contiguous_format)
        for mesh_dim in range(mesh.ndim):
            broadcast(full, mesh, mesh_dim, src_data_rank)
    local = part_of(full, mesh, placements)
    return wrap_local(local, mesh, placements, tensor.shape, tensor.stride(), tensor.requires_grad)


def redistribute(
    tensor: DTensor, mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
) -> DTensor:
    """A DTensor with other placements, whatever they are before and after. Differentiable; collective.

    The result is a `ShardedDTensor` when ``tensor`` is one or a placement is ragged, else torch's DTensor.

    Raises:
        ValueError: another mesh, or placements that do not fit.
    """
    if placements is None or isinstance(tensor, ShardedDTensor) or has_ragged(placements):
        return redistribute_sharded(tensor, mesh, placements)
    return tensor.redistribute(mesh, placements)


def _first_replicas(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    with torch.no_grad():
        checked = local.detach().clone(memory_format=torch.contiguous_format)
        for mesh_dim, placement in enumerate(placements):
            if placement.is_replicate():
                broadcast(checked, mesh, mesh_dim, 0)
    return checked.requires_grad_(local.requires_grad)


def _contiguous_stride(size: torch.Size) -> tuple[int, ...]:
    return torch.empty(size, device="meta").stride()
