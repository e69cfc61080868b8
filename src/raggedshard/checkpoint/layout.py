"""Which boxes of a tensor a rank holds, and which of them it writes: arithmetic, the same on every rank.

(7, 8), RaggedShard((2, 2, 2, 1)) x 2 replicas        ranks 0-3 are replica 0, ranks 4-7 replica 1
rows     0 1 | 2 3 | 4 5 | 6
held     0,4   1,5   2,6   3,7
written  0     1     2     3       as tensor number 0; number 1 by ranks 4 to 7, so that replicas share the work
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from raggedshard.cuts import Piece
from raggedshard.geometry import Box
from raggedshard.placements import cut_of, pieces_of, shape_of

__all__ = ["TensorLayout", "file_name", "files_of"]


@dataclass(frozen=True)
class TensorLayout:
    """How the ranks hold one tensor. Without a mesh every rank holds all of it, and rank 0 writes it.

    Args:
        key: its key in the flat state.
        dtype: its name in safetensors files: ``F32``, ``BF16``, ...
        shape: global.
        mesh_shape: ranks per mesh dim.
        mesh_ranks: the global ranks of the mesh in row-major order.
        placements: one per mesh dim; not Partial.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...] = ()
    mesh_ranks: tuple[int, ...] = (0,)
    placements: tuple[Any, ...] = ()

    @classmethod
    def on_mesh(
        cls,
        key: str,
        dtype: str,
        shape: Sequence[int],
        mesh_shape: Sequence[int],
        mesh_ranks: Sequence[int],
        placements: Sequence[Any],
        rank: int,
        local_shape: Sequence[int],
    ) -> TensorLayout:
        """The layout of a tensor that lies on a mesh, of which ``rank`` holds ``local_shape``.

        Raises:
            ValueError: it holds terms of a sum, or another shape than the placements give the rank.
        """
        placements = tuple(placements)
        if any(placement.is_partial() for placement in placements):
            raise ValueError(
                f"key '{key}': a tensor with placements {placements} holds terms, not values: reduce it first"
            )
        layout = cls(key, dtype, tuple(shape), tuple(mesh_shape), tuple(mesh_ranks), placements)
        coordinate = layout._coordinate(rank)
        if coordinate is None:
            return layout
        expected = shape_of(layout.shape, layout.mesh_shape, placements, coordinate)
        if tuple(local_shape) != expected:
            raise ValueError(
                f"key '{key}': this rank holds {tuple(local_shape)} of {layout.shape}, but placements {placements} "
                f"give it {expected}: which rows it holds cannot be told"
            )
        return layout

    def held_by(self, rank: int) -> tuple[Piece, ...]:
        """The pieces of a rank; none for a rank outside of the mesh."""
        coordinate = () if not self.mesh_shape else self._coordinate(rank)
        return () if coordinate is None else _pieces(self.shape, self.mesh_shape, self.placements, coordinate)

    def written_by(self, rank: int, number: int) -> tuple[Piece, ...]:
        """The pieces that a rank writes of this tensor, the state's ``number``-th: each has one writer.

        A tensor without elements has one empty piece, so that some file states its shape.
        """
        coordinate = self._coordinate(rank)
        if coordinate is None:
            return ()
        empty = math.prod(self.shape) == 0
        for size, placement, index in zip(self.mesh_shape, self.placements, coordinate, strict=True):
            if index != number % size and (empty or cut_of(placement) is None):
                return ()
        if empty:
            local = shape_of(self.shape, self.mesh_shape, self.placements, coordinate)
            return (Piece(_whole(self.shape), _whole(local)),)
        return _pieces(self.shape, self.mesh_shape, self.placements, coordinate)

    def _coordinate(self, rank: int) -> tuple[int, ...] | None:
        if rank not in self.mesh_ranks:
            return None
        index, coordinate = self.mesh_ranks.index(rank), []
        for size in reversed(self.mesh_shape):
            index, remainder = divmod(index, size)
            coordinate.append(remainder)
        return tuple(reversed(coordinate))


_pieces = lru_cache(maxsize=65536)(pieces_of)  # layers repeat their shapes


def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def files_of(layouts: Sequence[TensorLayout], rank: int) -> dict[str, list[tuple[TensorLayout, Piece]]]:
    """The files that a rank writes and the pieces in each.

    A safetensors file holds one array per key, so a second piece of the same tensor goes to a second file.
    """
    written = [layout.written_by(rank, number) for number, layout in enumerate(layouts)]
    count = max(map(len, written), default=0)
    return {
        file_name(rank, index, count): [
            (layout, pieces[index]) for layout, pieces in zip(layouts, written, strict=True) if index < len(pieces)
        ]
        for index in range(count)
    }


def file_name(rank: int, index: int, count: int) -> str:
    """Named as torch's Hugging Face storage writer names the files of rank ``rank``."""
    return f"shard-{rank + 1:05}-model-{index + 1:05}-of-{count:05}.safetensors"
