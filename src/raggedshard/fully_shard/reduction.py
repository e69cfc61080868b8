"""The fused input of a gradient reduction, and what gradients are divided by: rules of both backends.

    chunk for a rank:  | front | gradient of p0 for that rank (padded) | gradient of p1 ... |     one dtype a region

The front of the first region says for each parameter whether this rank has a gradient for it; the sum over ranks
then says whether any rank has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Generic, Protocol, TypeVar

from raggedshard.fully_shard.layout import FusedLayout, ShardLayout

__all__ = ["ReducedParam", "Region", "divisors", "params_of", "plan_regions", "used_anywhere"]


class ReducedParam(Protocol):
    """A parameter that has a gradient to reduce."""

    layout: ShardLayout
    reduce_dtype: Any


P = TypeVar("P", bound=ReducedParam)


@dataclass(frozen=True)
class Region(Generic[P]):
    """The gradients of one dtype in a chunk.

    Args:
        params: in the order of their gradients.
        dtype: the backend's own.
        starts: each parameter's first element in the region.
        numel: elements of the region in one chunk.
    """

    params: tuple[P, ...]
    dtype: Any
    starts: tuple[int, ...]
    numel: int


def plan_regions(params: Sequence[P], front: int = 0) -> list[Region[P]]:
    """One region per reduce dtype, in an order that all ranks agree on.

    Args:
        params: those that take part, in an order that all ranks agree on.
        front: elements in front of the used flags, for the backend's own use.
    """
    ordered = sorted(params, key=lambda p: str(p.reduce_dtype))
    front += len(ordered)
    regions = []
    for dtype, group in groupby(ordered, key=lambda p: p.reduce_dtype):
        members = tuple(group)
        layout = FusedLayout.pack(tuple((p.layout.padded_numel, 1) for p in members), header=front)
        regions.append(Region(members, dtype, layout.offsets, layout.chunk_bytes))
        front = 0
    return regions


def params_of(regions: Iterable[Region[P]]) -> list[P]:
    """The parameters of a chunk, in the order of their gradients and of their used flags."""
    return [p for region in regions for p in region.params]


def used_anywhere(params: Sequence[P], flags: Sequence[float]) -> set[P]:
    """The parameters that some rank had a gradient for, by the sums over ranks of their used flags.

    One that no rank used has no gradient, as without sharding.
    """
    return {p for p, flag in zip(params, flags, strict=True) if flag > 0}


def divisors(factor: float | None, ranks: int, is_half: bool) -> tuple[float, float]:
    """What to divide gradients by before and after they are added up.

    Args:
        factor: the user's, or ``None`` for the mean over ranks.
        ranks: all data-parallel ranks.
        is_half: whether gradients are added up in float16, whose range calls for two steps.
    """
    whole = float(ranks) if factor is None else factor
    if not is_half:
        return 1.0, whole
    before = 1.0
    while before * before < whole:
        before *= 2.0
    return before, whole / before
