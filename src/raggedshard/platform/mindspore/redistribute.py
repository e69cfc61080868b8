"""Changing the layout of a local tensor, by the plans of `raggedshard.transitions`. No autograd here.

Boxes are copied in host memory: MindSpore's in-place copies into views are silently lost on a CPU.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint

from raggedshard.cuts import Piece
from raggedshard.geometry import Box
from raggedshard.placements import Replicate, cut_of, pieces_of, shape_of
from raggedshard.platform.mindspore.collectives import all_gather, all_reduce
from raggedshard.platform.mindspore.device_mesh import DeviceMesh
from raggedshard.platform.mindspore.private import no_grad
from raggedshard.transitions import Transition, plan_transition

__all__ = ["box_view", "part_of", "redistribute_local", "to_host", "to_tensor"]


@no_grad()
def redistribute_local(
    local: Tensor, shape: Sequence[int], mesh: DeviceMesh, source: Sequence[Any], target: Sequence[Any]
) -> Tensor:
    """This rank's local tensor under ``target``, given the one under ``source``. Collective.

    Args:
        shape: the global shape.

    Raises:
        ValueError: a placement does not fit, or the target is a Partial that the source is not.
    """
    if tuple(source) == tuple(target):
        return local
    source = list(source)
    for mesh_dim, (before, after) in enumerate(zip(source, target, strict=True)):
        if after.is_partial() and before != after:
            raise ValueError(f"mesh dim {mesh_dim}: {before} cannot be turned into {after}; redistribute to Replicate")
        if before.is_partial() and before != after:
            local = _reduce(local, before.reduce_op, mesh, mesh_dim)
            source[mesh_dim] = Replicate()
    source_cuts, target_cuts = tuple(map(cut_of, source)), tuple(map(cut_of, target))
    if source_cuts == target_cuts:
        return local
    coordinate = _coordinate(mesh)
    plan = plan_transition(tuple(shape), mesh.shape, source_cuts, target_cuts, coordinate)
    result = np.empty(plan.target_shape, _host_dtype(local))
    locals_ = _gather_locals(local, plan, mesh)
    for copy in plan.copies:
        box_view(result, copy.target_piece, copy.box)[...] = box_view(locals_[copy.source], copy.source_piece, copy.box)
    return to_tensor(result, local.dtype)


def part_of(full: np.ndarray, mesh: DeviceMesh, placements: Sequence[Any]) -> np.ndarray:
    """This rank's part of a global array that every rank holds; a new contiguous array. No communication."""
    coordinate = _coordinate(mesh)
    local = np.empty(shape_of(full.shape, mesh.shape, placements, coordinate), full.dtype)
    for piece in pieces_of(full.shape, mesh.shape, placements, coordinate):
        box_view(local, piece, piece.box)[...] = full[_within(*piece.box)]
    return local


def to_host(tensor: Tensor) -> np.ndarray:
    """A host array of a plain tensor's values; bfloat16, which numpy lacks, as float32."""
    return tensor.astype(ms.float32).asnumpy() if tensor.dtype == ms.bfloat16 else tensor.asnumpy()


def to_tensor(array: np.ndarray, dtype: Any) -> Tensor:
    """A new tensor of ``dtype`` from a host array; also of no elements."""
    if array.size == 0:
        return mint.empty(array.shape, dtype=dtype)
    return Tensor(array, dtype)


def _host_dtype(tensor: Tensor) -> Any:
    return np.float32 if tensor.dtype == ms.bfloat16 else ms.dtype_to_nptype(tensor.dtype)


def _reduce(local: Tensor, op: str, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
    group = mesh.get_group(mesh_dim)
    if op == "avg":
        return all_reduce(local, group) / group.size
    if op not in ("sum", "max", "min"):
        raise ValueError(f"mesh dim {mesh_dim}: a Partial({op!r}) cannot be reduced; sum, avg, max and min can")
    return all_reduce(local, group, op)


def _gather_locals(local: Tensor, plan: Transition, mesh: DeviceMesh) -> list[np.ndarray]:
    """The local arrays of ``plan.mesh_dims``; they travel padded to one size, as an all-gather needs."""
    flat = to_host(local).reshape(-1)
    if not plan.mesh_dims:
        return [flat.reshape(plan.source_shapes[0])]
    padded = np.zeros(plan.padded_numel, flat.dtype)
    padded[: flat.size] = flat
    tensors = [to_tensor(padded, ms.float32 if local.dtype == ms.bfloat16 else local.dtype)]
    for mesh_dim in reversed(plan.mesh_dims):
        gathered = [all_gather(tensor, mesh.get_group(mesh_dim)) for tensor in tensors]
        tensors = list(itertools.chain.from_iterable(zip(*gathered, strict=True)))
    return [
        tensor.asnumpy().reshape(-1)[: math.prod(shape)].reshape(shape)
        for tensor, shape in zip(tensors, plan.source_shapes, strict=True)
    ]


def box_view(local: np.ndarray, piece: Piece, box: Box) -> np.ndarray:
    """The view of a local array that stores the part ``box`` of ``piece.box``; of the shape of ``box``."""
    stored = local[_within(piece.local.offsets, piece.local.sizes)].view()
    # Only dim 0 is ever split (a ragged cut flattens leading dims), which needs no copy; setting the shape makes sure.
    stored.shape = piece.box.sizes
    starts = [inner - outer for inner, outer in zip(box.offsets, piece.box.offsets, strict=True)]
    return stored[_within(starts, box.sizes)]


def _within(starts: Sequence[int], sizes: Sequence[int]) -> tuple[Any, ...]:
    """The index of a box; the ellipsis keeps an array of no dims an array."""
    return (..., *(slice(start, start + size) for start, size in zip(starts, sizes, strict=True)))


def _coordinate(mesh: DeviceMesh) -> tuple[int, ...]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RuntimeError(f"this rank holds no part of a tensor on {mesh}: it is no part of the mesh")
    return coordinate


_coordinate = functools.lru_cache(maxsize=64)(_coordinate)
