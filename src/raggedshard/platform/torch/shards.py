"""Local tensors and the boxes of the global tensor that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement

from raggedshard.cuts import Cut, Piece, local_pieces, local_shape
from raggedshard.geometry import Box
from raggedshard.placements import cut_of, is_ragged
from raggedshard.platform.torch.collectives import coordinate_of
from raggedshard.platform.torch.private import AsyncCollectiveTensor

__all__ = [
    "as_terms",
    "box_view",
    "cuts_of",
    "dense_stride",
    "has_partial",
    "has_ragged",
    "local_of",
    "part_of",
    "pieces_on",
    "shape_on",
    "sharding_dims",
]


def cuts_of(placements: Sequence[Placement]) -> tuple[Cut | None, ...]:
    return tuple(cut_of(placement) for placement in placements)


def has_ragged(placements: Sequence[Placement]) -> bool:
    return any(is_ragged(placement) for placement in placements)


def has_partial(placements: Sequence[Placement]) -> bool:
    return any(placement.is_partial() for placement in placements)


def sharding_dims(placements: Sequence[Placement]) -> tuple[int, ...]:
    """The mesh dims whose ranks hold different parts."""
    return tuple(d for d, placement in enumerate(placements) if cut_of(placement) is not None)


def local_of(tensor: DTensor) -> torch.Tensor:
    """The local tensor itself, not a view; waits for a collective that is still filling it.

    Raises:
        RuntimeError: a gathered view whose base was changed since.
    """
    gathered = getattr(tensor, "_gathered", None)
    if gathered is not None:
        gathered.check()
    local = tensor._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def shape_on(mesh: DeviceMesh, shape: Sequence[int], placements: Sequence[Placement]) -> tuple[int, ...]:
    """Shape of this rank's local tensor."""
    return _shape(tuple(shape), tuple(mesh.shape), cuts_of(placements), coordinate_of(mesh))


def pieces_on(mesh: DeviceMesh, shape: Sequence[int], placements: Sequence[Placement]) -> tuple[Piece, ...]:
    """What this rank's local tensor holds."""
    return _pieces(tuple(shape), tuple(mesh.shape), cuts_of(placements), coordinate_of(mesh))


_shape = lru_cache(maxsize=4096)(local_shape)
_pieces = lru_cache(maxsize=4096)(local_pieces)


def box_view(local: torch.Tensor, piece: Piece, box: Box | None = None) -> torch.Tensor:
    """The view of a local tensor that stores ``piece.box``, or the part ``box`` of it; of the shape of the box."""
    view = local
    for dim, (offset, size) in enumerate(zip(piece.local.offsets, piece.local.sizes, strict=True)):
        view = view.narrow(dim, offset, size)
    view = view.view(piece.box.sizes)  # only dim 0 is ever split: a view at any strides
    if box is None:
        return view
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        view = view.narrow(dim, offset - piece.box.offsets[dim], size)
    return view


def part_of(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """This rank's new, contiguous local tensor of a global tensor that every rank holds. No communication."""
    local = torch.empty(shape_on(mesh, full.shape, placements), dtype=full.dtype, device=full.device)
    for piece in pieces_on(mesh, full.shape, placements):
        index = tuple(slice(o, o + s) for o, s in zip(piece.box.offsets, piece.box.sizes, strict=True))
        box_view(local, piece).copy_(full[index])
    return as_terms(local, mesh, placements)


def as_terms(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """Turn a value that is replicated over the Partial dims of ``placements`` into terms that reduce to it.

    A sum: rank 0 of the dim keeps the value and the others hold zeros, which is exact in every dtype.

    Raises:
        ValueError: a Partial whose reduction has no such terms.
    """
    for mesh_dim, placement in enumerate(placements):
        if not placement.is_partial():
            continue
        operation = placement.reduce_op if type(placement) is Partial else None
        if operation == "sum":
            if coordinate_of(mesh)[mesh_dim]:
                local = torch.zeros_like(local)
        elif operation not in ("avg", "min", "max"):
            raise ValueError(f"mesh dim {mesh_dim}: a value cannot be turned into terms of {placement}")
    return local


@lru_cache(maxsize=4096)
def dense_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The stride that an operation gives its result for an operand of ``stride``: without gaps, dims in its order."""
    return torch.empty_like(torch.empty_strided(shape, stride, device="meta")).stride()
