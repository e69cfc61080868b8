"""Runs of rows and boxes in a tensor: integers only, no framework.

rows    0 1 | 2 3 | 4 5 | 6 .      (7, 8) on 4 ranks: chunk size 2, actual 2 2 2 1, padded 2 2 2 2
rank     0     1     2     3
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = [
    "Box",
    "Run",
    "chunk",
    "chunk_lengths",
    "chunk_size",
    "coordinates",
    "ragged_runs",
    "run_boxes",
    "strided_blocks",
]


class Run(NamedTuple):
    """A run of consecutive rows (or cells): ``start <= row < start + length``."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


class Box(NamedTuple):
    """A rectangle in a tensor: one offset and one size per dim, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def chunk_size(rows: int, parts: int) -> int:
    """``ceil(rows / parts)``: the rows that a collective carries for each rank."""
    return -(-rows // parts)


def chunk(rows: int, parts: int, index: int) -> Run:
    """Rows of part ``index``: ``start = min(index * c, rows)``, ``length = min(c, rows - start)``.

    ``c = ceil(rows / parts)``. Source: the requirement's section 6.4; torch's ``Shard`` cuts alike.
    """
    size = chunk_size(rows, parts)
    start = min(index * size, rows)
    return Run(start, min(size, rows - start))


def chunk_lengths(rows: int, parts: int) -> tuple[int, ...]:
    """Rows of every part, in rank order: ``chunk_lengths(10, 4) == (3, 3, 3, 1)``."""
    return tuple(chunk(rows, parts, index).length for index in range(parts))


def ragged_runs(cells: int, units: Sequence[int]) -> tuple[Run, ...]:
    """Runs of ``cells`` cells in proportion to ``units``.

    Raises:
        ValueError: the units are negative or sum to zero, or ``cells`` does not divide by their sum.
    """
    scale = _cells_per_unit(cells, units)
    starts = itertools.accumulate(units, initial=0)
    return tuple(Run(start * scale, unit * scale) for start, unit in zip(starts, units, strict=False))


def _cells_per_unit(cells: int, units: Sequence[int]) -> int:
    total = sum(units)
    if total <= 0 or min(units) < 0:
        raise ValueError(f"local_units must be >= 0 with a positive sum, got {tuple(units)}")
    if cells % total:
        raise ValueError(f"{cells} cells do not divide by the sum {total} of local_units {tuple(units)}")
    return cells // total


def strided_blocks(rows: int, parts: Sequence[int]) -> tuple[Run, ...]:
    """The blocks that mesh dims of sizes ``parts`` make of ``rows`` rows, one chunk rule after the other.

    ``strided_blocks(5, (2, 2))`` is 2, 1, 1, 1 rows: 5 -> 3 + 2 -> (2 + 1) + (1 + 1).
    """
    blocks = [Run(0, rows)]
    for count in parts:
        blocks = [
            Run(block.start + part.start, part.length)
            for block in blocks
            for part in (chunk(block.length, count, index) for index in range(count))
        ]
    return tuple(blocks)


def coordinates(mesh_shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All coordinates of a mesh in row-major (rank) order."""
    return itertools.product(*(range(size) for size in mesh_shape))


def run_boxes(run: Run, shape: Sequence[int]) -> list[Box]:
    """Cover a run of flattened (row-major) cells of ``shape`` by as few boxes as a greedy walk needs, in order.

    A run that starts and stops within rows gives a head, a body and a tail per dim:

        . . h h
        b b b b        run (2, 8) of a (4, 4) grid: boxes (0:1, 2:4), (1:2, 0:4), (2:3, 0:2)
        t t . .
        . . . .
    """
    if run.length == 0:
        return []
    if len(shape) == 1:
        return [Box((run.start,), (run.length,))]
    inner = math.prod(shape[1:])
    boxes: list[Box] = []
    position = run.start
    while position < run.stop:
        row, column = divmod(position, inner)
        left = run.stop - position
        if column == 0 and left >= inner:
            rows = left // inner
            boxes.append(Box((row, *(0,) * (len(shape) - 1)), (rows, *shape[1:])))
            position += rows * inner
        else:
            part = Run(column, min(inner - column, left))
            boxes += [Box((row, *b.offsets), (1, *b.sizes)) for b in run_boxes(part, shape[1:])]
            position += part.length
    return boxes
