"""Changing the layout of a local tensor. No autograd here: see `raggedshard.platform.torch.autograd`.

from            to              does
Partial         anything        all-reduce over the mesh dim, then as from Replicate
cut             anything        all-gather over the mesh dims whose cut changes (`raggedshard.transitions`)
Replicate       cut             a copy of the rank's own boxes
anything        Partial         as to Replicate; a sum keeps the value on rank 0 of the dim, zeros elsewhere
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from raggedshard.platform.torch.collectives import all_reduce, coordinate_of, gather
from raggedshard.platform.torch.private import AsyncCollectiveTensor
from raggedshard.platform.torch.shards import as_terms, box_view, cuts_of, local_of
from raggedshard.transitions import Transition, plan_transition

__all__ = ["full_local", "redistribute_local"]

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def full_local(tensor: DTensor) -> torch.Tensor:
    """The global tensor on every rank; the local tensor itself when it is that already."""
    replicated = (Replicate(),) * tensor.device_mesh.ndim
    return redistribute_local(local_of(tensor), tensor.shape, tensor.device_mesh, tensor.placements, replicated)


def redistribute_local(
    local: torch.Tensor,
    shape: Sequence[int],
    mesh: DeviceMesh,
    source: Sequence[Placement],
    target: Sequence[Placement],
) -> torch.Tensor:
    """This rank's local tensor under ``target``, given the one under ``source``.

    Args:
        local: any strides and dtype. Returned itself when nothing changes.
        shape: the global shape.

    Raises:
        ValueError: ``local`` has not the shape that ``source`` gives it, the placements do not fit the shape, or
            the value cannot be turned into a Partial of this kind.
    """
    if tuple(source) == tuple(target):
        return local
    local, source = _reduce_partials(local, mesh, source, target)
    moved = _move(local, tuple(shape), mesh, source, target)
    becomes_partial = [
        after if after.is_partial() and before != after else Replicate()
        for before, after in zip(source, target, strict=True)
    ]
    return as_terms(moved, mesh, becomes_partial)


def _reduce_partials(
    local: torch.Tensor, mesh: DeviceMesh, source: Sequence[Placement], target: Sequence[Placement]
) -> tuple[torch.Tensor, list[Placement]]:
    placements = list(source)
    for mesh_dim, (before, after) in enumerate(zip(source, target, strict=True)):
        if before.is_partial() and before != after:
            local = _reduce(local, before, mesh, mesh_dim)
            placements[mesh_dim] = Replicate()
    return local, placements


def _reduce(local: torch.Tensor, partial: Placement, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
    if local.is_meta:
        return local
    operation = partial.reduce_op if type(partial) is Partial else None
    if operation == "avg":  # gloo has no average
        return all_reduce(local, dist.ReduceOp.SUM, mesh, mesh_dim).div_(mesh.size(mesh_dim))
    if operation in _REDUCE_OPS:
        return all_reduce(local, _REDUCE_OPS[operation], mesh, mesh_dim)
    reduced = partial._reduce_value(local, mesh, mesh_dim)  # type: ignore[attr-defined]  # torch's own kinds
    return reduced.wait() if isinstance(reduced, AsyncCollectiveTensor) else reduced


def _move(
    local: torch.Tensor,
    shape: tuple[int, ...],
    mesh: DeviceMesh,
    source: Sequence[Placement],
    target: Sequence[Placement],
) -> torch.Tensor:
    source_cuts, target_cuts = cuts_of(source), cuts_of(target)
    if source_cuts == target_cuts:
        return local
    coordinate = coordinate_of(mesh)
    plan = plan_transition(shape, tuple(mesh.shape), source_cuts, target_cuts, coordinate)
    own = _own_index(plan, mesh, coordinate)
    if tuple(local.shape) != plan.source_shapes[own]:
        raise ValueError(
            f"the local tensor has shape {tuple(local.shape)}, but placements {tuple(source)} of the global shape "
            f"{shape} give {plan.source_shapes[own]} at mesh coordinate {coordinate}"
        )
    result = local.new_empty(plan.target_shape)
    if local.is_meta:
        return result
    locals_ = _gather_locals(local, plan, mesh) if plan.mesh_dims else [local]
    for copy in plan.copies:
        box_view(result, copy.target_piece, copy.box).copy_(box_view(locals_[copy.source], copy.source_piece, copy.box))
    return result


def _own_index(plan: Transition, mesh: DeviceMesh, coordinate: tuple[int, ...]) -> int:
    index = 0
    for mesh_dim in plan.mesh_dims:
        index = index * mesh.size(mesh_dim) + coordinate[mesh_dim]
    return index


def _gather_locals(local: torch.Tensor, plan: Transition, mesh: DeviceMesh) -> list[torch.Tensor]:
    """The local tensors of ``plan.mesh_dims``; they travel padded to one size, which gloo's gather asks for."""
    flat = local.resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.numel() != plan.padded_numel:
        padded = flat.new_zeros(plan.padded_numel)
        padded[: flat.numel()].copy_(flat)
        flat = padded
    rows = gather(flat, mesh, plan.mesh_dims).view(len(plan.source_shapes), plan.padded_numel)
    numels = [torch.Size(shape).numel() for shape in plan.source_shapes]
    return [row[:numel].view(shape) for row, numel, shape in zip(rows, numels, plan.source_shapes, strict=True)]
