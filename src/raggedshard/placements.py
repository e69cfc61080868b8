"""Placement value types and their rules: what each mesh dim does to a tensor.

The classes here need no framework. A backend whose framework has its own placements (torch) uses those for
``Replicate``, ``Shard`` and ``Partial`` and derives its ragged classes from the ones here, so that the rules below
stand once: `cut_of` reads any of them.

    (7, 8) on 4 ranks              RaggedShard((0,), (2, 2, 2, 1))
    (7, 8), TP 2 then FSDP 2       RaggedStridedShard((0,), (2, 2, 2, 1), split_factor=2), Shard(0)

        rows        0 1 | 2 3 || 4 5 | 6         blocks of 4 and 3 rows (TP), each cut raggedly (FSDP)
        (fsdp, tp)  0,0   1,0    0,1   1,1
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raggedshard.cuts import Cut, Piece, check_cuts, local_pieces, local_shape
from raggedshard.geometry import coordinates

__all__ = [
    "Partial",
    "RaggedShard",
    "RaggedStridedShard",
    "Replicate",
    "Shard",
    "StridedShard",
    "check_placements",
    "cut_of",
    "global_pieces",
    "is_ragged",
    "pieces_of",
    "shape_of",
]


class _Placement:
    """Questions that every placement answers, as torch's do."""

    def is_shard(self, dim: int | None = None) -> bool:
        return False

    def is_replicate(self) -> bool:
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return False


@dataclass(frozen=True)
class Replicate(_Placement):
    """Every rank of the mesh dim holds the same."""

    def is_replicate(self) -> bool:
        return True


@dataclass(frozen=True)
class Partial(_Placement):
    """Every rank of the mesh dim holds a term of the value; ``reduce_op`` joins them."""

    reduce_op: str = "sum"

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or reduce_op == self.reduce_op


@dataclass(frozen=True)
class Shard(_Placement):
    """Chunks of ``ceil(n / ranks)`` along tensor dim ``dim``."""

    dim: int

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim


@dataclass(frozen=True)
class StridedShard(Shard):
    """Chunks of each of the ``split_factor`` blocks that later mesh dims make of ``dim`` first."""

    split_factor: int = 1


class RaggedShard(_Placement):
    """Rank i holds a run of cells in proportion to ``local_units[i]``.

    Args:
        dims: the leading tensor dims ``(0, ..., k-1)`` that are flattened to cells.
        local_units: ints >= 0 with a positive sum, one per rank of the mesh dim.

    The number of cells divides by ``sum(local_units)``; the local tensor has shape ``(cells_i, *shape[k:])``.

    Raises:
        ValueError: ``dims`` or ``local_units`` break these rules.

    Example:
        ``RaggedShard((0, 1), (1, 2))`` on shape (6, 4, 8): 24 cells, rank 0 holds 8 as (8, 8), rank 1 16 as (16, 8).
    """

    dims: tuple[int, ...]
    local_units: tuple[int, ...]
    split_factor: int

    def __init__(self, dims: Sequence[int], local_units: Sequence[int]) -> None:
        self._set(dims, local_units, 1)

    def _set(self, dims: Sequence[int], local_units: Sequence[int], split_factor: int) -> None:
        dims, units = tuple(dims), tuple(local_units)
        if not dims or dims != tuple(range(len(dims))):
            raise ValueError(f"{type(self).__name__}: dims must be (0, ..., k-1), got {dims}")
        if not all(type(unit) is int and unit >= 0 for unit in units) or sum(units) <= 0:
            raise ValueError(f"{type(self).__name__}: local_units must be ints >= 0 with a positive sum, got {units}")
        if type(split_factor) is not int or split_factor < 1:
            raise ValueError(f"{type(self).__name__}: split_factor must be an int >= 1, got {split_factor!r}")
        object.__setattr__(self, "dims", tuple(range(len(dims))))
        object.__setattr__(self, "local_units", units)
        object.__setattr__(self, "split_factor", split_factor)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def _key(self) -> tuple[Any, ...]:
        return (self.dims, self.local_units, self.split_factor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard) and type(other) is type(self) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((type(self).__name__, *self._key()))

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.dims, self.local_units))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(dims={self.dims}, local_units={self.local_units})"


class RaggedStridedShard(RaggedShard):
    """`RaggedShard` of each of the ``split_factor`` blocks that later mesh dims make of dim 0 first.

    Args:
        dims: as in `RaggedShard`.
        local_units: one per rank of the mesh dim when all blocks are cut alike, else one per block and rank,
            block-major.
        split_factor: the number of blocks: the product of the sizes of the later mesh dims that shard dim 0.

    Raises:
        ValueError: the arguments break these rules.
    """

    def __init__(self, dims: Sequence[int], local_units: Sequence[int], split_factor: int) -> None:
        self._set(dims, local_units, split_factor)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.dims, self.local_units, self.split_factor))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(dims={self.dims}, local_units={self.local_units}, split_factor={self.split_factor})"
        )


def is_ragged(placement: Any) -> bool:
    """Whether a placement is a `RaggedShard` or a `RaggedStridedShard` of either face."""
    return isinstance(placement, RaggedShard)


def cut_of(placement: Any) -> Cut | None:
    """The cut that a placement (of this module or of torch) makes; ``None`` for Replicate and Partial.

    Raises:
        TypeError: it is no placement that this library knows.
    """
    if is_ragged(placement):
        return Cut(placement.dims, placement.local_units, placement.split_factor)
    if hasattr(placement, "is_replicate") and (placement.is_replicate() or placement.is_partial()):
        return None
    if hasattr(placement, "is_shard") and isinstance(getattr(placement, "dim", None), int):
        return Cut((placement.dim,), None, int(getattr(placement, "split_factor", 1)))
    raise TypeError(f"unknown placement {placement!r}: expected Replicate, Shard, Partial or a ragged placement")


def shape_of(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Any], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """Shape of the local tensor at a mesh coordinate."""
    return local_shape(shape, mesh_shape, [cut_of(p) for p in placements], coordinate)


def pieces_of(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Any], coordinate: Sequence[int]
) -> tuple[Piece, ...]:
    """What a mesh coordinate holds: rectangles of the global tensor and where they lie in the local one."""
    return local_pieces(shape, mesh_shape, [cut_of(p) for p in placements], coordinate)


def global_pieces(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Any]
) -> dict[tuple[int, ...], tuple[Piece, ...]]:
    """`pieces_of` for every mesh coordinate."""
    return {c: pieces_of(shape, mesh_shape, placements, c) for c in coordinates(mesh_shape)}


def check_placements(shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Any]) -> None:
    """Check that placements fit a global shape and a mesh.

    Raises:
        ValueError: wrong number of placements or units, units that do not fit, a dim out of range, or cuts that
            contradict one another. The message names the mesh dim and the shape.
    """
    cuts = tuple(cut_of(p) for p in placements)
    try:
        _check_cuts(tuple(shape), tuple(mesh_shape), cuts)
    except ValueError as error:
        raise ValueError(f"placements {tuple(placements)} do not fit shape {tuple(shape)}: {error}") from None


_check_cuts = functools.lru_cache(check_cuts)  # asked for each parameter and each tensor made from it
