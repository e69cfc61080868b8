"""From the boxes that a checkpoint holds to the boxes that a rank wants."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import NamedTuple

from raggedshard.cuts import Piece
from raggedshard.geometry import Box
from raggedshard.transitions import intersection

__all__ = ["Read", "find_fault", "plan_reads"]


class Read(NamedTuple):
    """Copy ``box`` (of the global tensor) from chunk number ``chunk`` to ``piece`` of the local tensor."""

    chunk: int
    piece: Piece
    box: Box


def plan_reads(chunks: Sequence[Box], wanted: Sequence[Piece]) -> list[Read]:
    """The copies that fill the wanted pieces, chunk by chunk."""
    return [
        Read(number, piece, box)
        for number, chunk in enumerate(chunks)
        for piece in wanted
        if (box := intersection(chunk, piece.box)) is not None
    ]


class Fault(NamedTuple):
    """What is wrong with a tensor's chunks, and the chunk that shows it (``None``: none of them)."""

    text: str
    chunk: int | None


def find_fault(shape: Sequence[int], chunks: Sequence[Box]) -> Fault | None:
    """Whether the chunks fill a tensor of ``shape`` exactly once: ``None``, or what is wrong."""
    for number, chunk in enumerate(chunks):
        outside = len(chunk.offsets) != len(shape) or any(
            offset < 0 or size < 0 or offset + size > total
            for offset, size, total in zip(chunk.offsets, chunk.sizes, shape, strict=True)
        )
        if outside:
            return Fault(f"box {_show(chunk)} lies outside of shape {tuple(shape)}", number)
    pair = _overlapping(shape, chunks)
    if pair is not None:
        first, second = pair
        return Fault(f"boxes overlap: {_show(chunks[first])} and {_show(chunks[second])}", second)
    held, total = sum(chunk.numel for chunk in chunks), math.prod(shape)
    if held < total or not chunks:
        return Fault(f"a gap: the chunks hold {held} of the {total} elements of shape {tuple(shape)}", None)
    return None


def _overlapping(shape: Sequence[int], chunks: Sequence[Box]) -> tuple[int, int] | None:
    """Two chunks that overlap, found by a sweep along the longest dim."""
    if not shape:
        return (0, 1) if len(chunks) > 1 else None
    dim = max(range(len(shape)), key=lambda d: shape[d])
    active: list[tuple[int, int]] = []  # (end along dim, number)
    for number in sorted(range(len(chunks)), key=lambda n: chunks[n].offsets[dim]):
        start = chunks[number].offsets[dim]
        del active[: bisect_right(active, (start, len(chunks)))]
        for _, other in active:
            if intersection(chunks[other], chunks[number]) is not None:
                return other, number
        insort(active, (start + chunks[number].sizes[dim], number))
    return None


def _show(box: Box) -> str:
    """``[0:2, 0:8]``."""
    return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(box.offsets, box.sizes, strict=True)) + "]"
