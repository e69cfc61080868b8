"""From one layout of a tensor to another: which mesh dims must be gathered, and which box goes where.

Integers only, like `raggedshard.geometry`. A backend gathers the local tensors of the named mesh dims and copies
the boxes; it needs no rule of its own.

    axis 0 of (7, 8)                    cuts in the order they apply       gathered
    Shard(0)          -> RaggedShard    [d0: chunk]      -> [d0: ragged]   d0
    (Strided, Shard)  -> (Repl, Shard)  [d1: c, d0: s]   -> [d1: c]        d0       the common front stays where it is
    (Repl, RaggedS)   -> (Repl, Repl)   [d1: ragged]     -> []             d1
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from raggedshard.cuts import Cut, Piece, cut_order, local_pieces, local_shape
from raggedshard.geometry import Box

__all__ = ["BoxCopy", "Transition", "gathered_mesh_dims", "intersection", "plan_transition"]


class BoxCopy(NamedTuple):
    """Copy ``box`` (of the global tensor) from a piece of gathered local tensor ``source`` to a piece of the target."""

    source: int
    source_piece: Piece
    target_piece: Piece
    box: Box


class Transition(NamedTuple):
    """What one rank does to change a layout.

    mesh_dims: the mesh dims whose local tensors this rank needs; the gathered tensors are numbered in row-major
        order of their coordinates along these dims.
    source_shapes: the shape of each gathered local tensor.
    padded_numel: the largest number of elements of any local tensor of the mesh, so that all ranks send alike.
    target_shape: the shape of this rank's new local tensor.
    copies: they fill the new local tensor exactly once.
    """

    mesh_dims: tuple[int, ...]
    source_shapes: tuple[tuple[int, ...], ...]
    padded_numel: int
    target_shape: tuple[int, ...]
    copies: tuple[BoxCopy, ...]


@lru_cache(maxsize=4096)
def plan_transition(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    source: tuple[Cut | None, ...],
    target: tuple[Cut | None, ...],
    coordinate: tuple[int, ...],
) -> Transition:
    """The `Transition` of the rank at ``coordinate`` from the cuts ``source`` to the cuts ``target``.

    Raises:
        ValueError: one of the layouts does not fit the shape.
    """
    mesh_dims = gathered_mesh_dims(source, target)
    peers = [_with(coordinate, mesh_dims, c) for c in itertools.product(*(range(mesh_shape[d]) for d in mesh_dims))]
    wanted = local_pieces(shape, mesh_shape, target, coordinate)
    copies = [
        BoxCopy(number, held, want, box)
        for number, peer in enumerate(peers)
        for held in local_pieces(shape, mesh_shape, source, peer)
        for want in wanted
        if (box := intersection(held.box, want.box)) is not None
    ]
    cut_dims = [range(size) if cut is not None else range(1) for size, cut in zip(mesh_shape, source, strict=True)]
    padded = max(math.prod(local_shape(shape, mesh_shape, source, c)) for c in itertools.product(*cut_dims))
    return Transition(
        mesh_dims,
        tuple(local_shape(shape, mesh_shape, source, peer) for peer in peers),
        padded,
        local_shape(shape, mesh_shape, target, coordinate),
        tuple(copies),
    )


def gathered_mesh_dims(source: Sequence[Cut | None], target: Sequence[Cut | None]) -> tuple[int, ...]:
    """Mesh dims that must be gathered: those that cut the source and do not stand in the common front of an axis.

    A cut leaves the result of the cuts that apply before it alone, so a front that both layouts share needs nothing.
    """
    lead = max((len(cut.dims) for cut in (*source, *target) if cut is not None), default=1)
    kept: set[int] = set()
    for axis in {_axis(cut, lead) for cut in source if cut is not None}:
        before, after = _cuts_along(source, axis, lead), _cuts_along(target, axis, lead)
        front = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
        kept.update(mesh_dim for (mesh_dim, _), _ in front)
    return tuple(d for d, cut in enumerate(source) if cut is not None and d not in kept)


def intersection(first: Box, second: Box) -> Box | None:
    """The common part of two boxes of the same rank; ``None`` when it is empty."""
    starts = tuple(max(a, b) for a, b in zip(first.offsets, second.offsets, strict=True))
    stops = tuple(
        min(a + n, b + m) for a, n, b, m in zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True)
    )
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return None
    return Box(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))


def _axis(cut: Cut, lead: int) -> int:
    """The dims that some cut flattens are one axis."""
    return 0 if cut.dims[0] < lead else cut.dims[0]


def _cuts_along(cuts: Sequence[Cut | None], axis: int, lead: int) -> list[tuple[int, Cut]]:
    of_axis = {d: cut for d, cut in enumerate(cuts) if cut is not None and _axis(cut, lead) == axis}
    return [(d, of_axis[d]) for d in cut_order(of_axis)]


def _with(coordinate: Sequence[int], mesh_dims: Iterable[int], values: Iterable[int]) -> tuple[int, ...]:
    changed = list(coordinate)
    for mesh_dim, value in zip(mesh_dims, values, strict=True):
        changed[mesh_dim] = value
    return tuple(changed)
