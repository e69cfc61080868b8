"""Sizes of a sharded parameter and its place in fused communication buffers: integers only.

Three sizes, never inferred from one another:

    logical   ``size``                        what the unit's ranks hold together (after TP has cut the parameter)
    actual    ``sharded_size(rank)``          the rows a rank holds; dim-0 may be 0
    padded    ``padded_sharded_param_size``   what a collective carries for each rank

        rows     0 1 2 | 3 4 5 | 6 7 8 | 9 . .       (10, 3) on 4 ranks: actual 3 3 3 1, padded 3 3 3 3
        rank       0       1       2       3
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from raggedshard.geometry import Run, chunk_lengths, ragged_runs

__all__ = ["FusedLayout", "Segment", "ShardLayout", "align"]


class Segment(NamedTuple):
    """Ranks ``first_rank .. first_rank + ranks`` hold ``numel`` elements each, ``start`` is where the first begins.

    In a buffer of one padded chunk per rank, ``start`` counts from the beginning of the chunk; in the logical
    tensor it counts in row-major order and the ranks follow one another.
    """

    first_rank: int
    ranks: int
    start: int
    numel: int


@dataclass(frozen=True)
class ShardLayout:
    """How the ranks of the shard mesh dim hold a tensor of shape ``size``.

    Args:
        size: the logical shape.
        dim: the sharded dim. Dims other than 0 divide evenly (the requirement's section 3.2).
        lengths: rows (cells) of each rank along it.
        lead: the number of leading dims flattened to cells; 1 unless the user's ``RaggedShard`` names more.
    """

    size: tuple[int, ...]
    dim: int
    lengths: tuple[int, ...]
    lead: int = 1

    @classmethod
    def chunked(cls, size: Sequence[int], dim: int, world_size: int) -> ShardLayout:
        """Chunks of ``ceil(size[dim] / world_size)`` rows (the requirement's section 6.4)."""
        return cls(tuple(size), dim, chunk_lengths(size[dim], world_size))

    @classmethod
    def ragged(cls, size: Sequence[int], lead: int, units: Sequence[int]) -> ShardLayout:
        """Runs of cells in proportion to ``units``.

        Raises:
            ValueError: the cells do not divide by the sum of the units.
        """
        runs = ragged_runs(math.prod(size[:lead]), units)
        return cls(tuple(size), 0, tuple(run.length for run in runs), lead)

    @property
    def world_size(self) -> int:
        return len(self.lengths)

    @property
    def dim_shard_size(self) -> int:
        """Rows that a collective carries for each rank: the longest rank's."""
        return max(self.lengths)

    @property
    def is_even(self) -> bool:
        """Whether all ranks hold equally many rows, so that nothing is ever padded."""
        return min(self.lengths) == max(self.lengths)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.size)

    @cached_property
    def row_numel(self) -> int:
        """Elements of one row (cell)."""
        return math.prod(self._with_rows(1))

    def _with_rows(self, rows: int) -> tuple[int, ...]:
        if self.dim == 0:
            return (rows, *self.size[self.lead :])
        return (*self.size[: self.dim], rows, *self.size[self.dim + 1 :])

    def run(self, rank: int) -> Run:
        """``(actual_shard_offset, actual_shard_length)`` of a rank, in rows (cells)."""
        return Run(sum(self.lengths[:rank]), self.lengths[rank])

    def sharded_size(self, rank: int) -> tuple[int, ...]:
        """Shape of what a rank really holds."""
        return self._with_rows(self.lengths[rank])

    @cached_property
    def padded_sharded_param_size(self) -> tuple[int, ...]:
        """Shape of what a collective carries for each rank."""
        return self._with_rows(self.dim_shard_size)

    @cached_property
    def padded_numel(self) -> int:
        return self.dim_shard_size * self.row_numel

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The true elements, in the order of the logical tensor; ``start`` counts in that tensor.

        Neighbouring ranks with equally many rows share a segment, so an even parameter has one and the chunk rule
        gives at most two. For a dim other than 0 the logical order is that of the tensor with that dim moved first.
        """
        segments: list[Segment] = []
        start = 0
        for rank, length in enumerate(self.lengths):
            numel = length * self.row_numel
            if (
                numel
                and segments
                and segments[-1].numel == numel
                and segments[-1][:2] == _ending_at(segments[-1], rank)
            ):
                last = segments[-1]
                segments[-1] = last._replace(ranks=last.ranks + 1)
            elif numel:
                segments.append(Segment(rank, 1, start, numel))
            start += numel
        return tuple(segments)

    @cached_property
    def padding(self) -> tuple[Segment, ...]:
        """The elements of the ranks' padded chunks that belong to nobody; ``start`` counts within a chunk."""
        padding: list[Segment] = []
        for rank, length in enumerate(self.lengths):
            start = length * self.row_numel
            if start == self.padded_numel:
                continue
            last = padding[-1] if padding else None
            if last is not None and last.start == start and last[:2] == _ending_at(last, rank):
                padding[-1] = last._replace(ranks=last.ranks + 1)
            else:
                padding.append(Segment(rank, 1, start, self.padded_numel - start))
        return tuple(padding)


def _ending_at(segment: Segment, rank: int) -> tuple[int, int]:
    """``(first_rank, ranks)`` that a segment has if it ends right before ``rank``."""
    return segment.first_rank, rank - segment.first_rank


def align(position: int, itemsize: int) -> int:
    """The first multiple of ``itemsize`` at or after ``position``."""
    return -(-position // itemsize) * itemsize


@dataclass(frozen=True)
class FusedLayout:
    """Byte offsets of the fields in one rank's chunk of a fused buffer; all ranks' chunks are alike.

        | header | parameter 0 (padded) | parameter 1 (padded) | ...

    Fields follow one another by their padded sizes; a gap appears only in front of a wider dtype.
    """

    offsets: tuple[int, ...]
    chunk_bytes: int

    @classmethod
    @lru_cache(maxsize=4096)  # of every unit at every gather and reduction
    def pack(cls, fields: tuple[tuple[int, int], ...], header: int = 0, alignment: int = 1) -> FusedLayout:
        """Lay out fields of ``(numel, itemsize)`` behind a header of ``header`` bytes.

        Chunks are a multiple of ``alignment`` and of every item size, so that rows of a buffer can be viewed as both.
        """
        offsets = []
        position = header
        widest = alignment
        for numel, itemsize in fields:
            position = align(position, itemsize)
            offsets.append(position)
            position += numel * itemsize
            widest = max(widest, itemsize)
        return cls(tuple(offsets), align(position, widest))
