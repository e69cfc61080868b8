"""Random layouts (shape, mesh, placements) and what each rank must hold of them, worked out on explicit indices."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from raggedshard.geometry import Box
from raggedshard.placements import Partial, RaggedShard, RaggedStridedShard, Replicate, Shard, StridedShard

Indices = dict[tuple[int, ...], np.ndarray]


@dataclass(frozen=True)
class Layout:
    """A layout and the cells or rows that each mesh coordinate holds along each axis of its local tensor.

    Args:
        held: per axis of the local tensor, the indices by mesh coordinate; axis 0 is the flattened ``lead`` dims.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[Any, ...]
    lead: int
    held: tuple[Indices, ...]

    @property
    def copies(self) -> int:
        """How many ranks hold each element."""
        sizes = zip(self.mesh_shape, self.placements, strict=True)
        return math.prod(size for size, p in sizes if p.is_replicate() or p.is_partial())

    def local_of(self, tensor: np.ndarray, coordinate: tuple[int, ...]) -> np.ndarray:
        """The local tensor of a coordinate, by plain numpy indexing."""
        if not self.shape:
            return tensor
        flat = tensor.reshape(math.prod(self.shape[: self.lead]), *self.shape[self.lead :])
        return flat[np.ix_(*(axis[coordinate] for axis in self.held))]


def ranks(mesh_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(size) for size in mesh_shape)))


@st.composite
def compositions(draw: st.DrawFn, total: int, parts: int) -> tuple[int, ...]:
    """``parts`` ints >= 0 that sum to ``total``."""
    marks = sorted(draw(st.sampled_from(range(total + 1))) for _ in range(parts - 1))
    return tuple(b - a for a, b in itertools.pairwise([0, *marks, total]))


@st.composite
def divisors(draw: st.DrawFn, number: int) -> int:
    """A divisor of ``number``; any small int when it is zero."""
    return draw(st.sampled_from([d for d in range(min(number, 60), 0, -1) if number % d == 0] or [1, 2, 3, 7]))


@st.composite
def layouts(draw: st.DrawFn, like: Layout | None = None, mesh_shape: tuple[int, ...] | None = None) -> Layout:
    """Layouts that fit: every mix of placements, several mesh dims on one tensor dim, nested and strided cuts.

    Args:
        like: a layout whose shape and mesh the drawn one has.
        mesh_shape: the mesh; any of 1 to 3 dims by default.
    """
    # sampled_from, because integers() prefers 0 and 1 and most tensors would be empty
    if mesh_shape is None:
        mesh_shape = tuple(draw(st.sampled_from([1, 2, 3, 4])) for _ in range(draw(st.sampled_from([1, 2, 3]))))
    shape = tuple(draw(st.sampled_from([*range(1, 18), 0])) for _ in range(draw(st.sampled_from([1, 2, 3, 0]))))
    if like is not None:
        shape, mesh_shape = like.shape, like.mesh_shape
    lead = draw(st.integers(1, len(shape))) if shape else 1
    sizes = [math.prod(shape[:lead]), *shape[lead:]] if shape else []
    # Axis 0 is drawn more often: that is where cuts meet.
    choices = [None, *range(len(sizes)), *([0, 0] if sizes else [])]
    axis_of = [draw(st.sampled_from(choices)) for _ in mesh_shape]
    placements: list[Any] = [draw(st.sampled_from([Replicate(), Partial()])) for _ in mesh_shape]
    held = []
    for axis, size in enumerate(sizes):
        mesh_dims = [d for d, chosen in enumerate(axis_of) if chosen == axis]
        dims = tuple(range(lead)) if axis == 0 else (axis + lead - 1,)
        held.append(_cut_axis(draw, size, dims, mesh_dims, mesh_shape, placements, ragged=axis == 0))
    if not any(isinstance(p, RaggedShard) for p in placements):
        # Nothing flattens the leading dims, so they are axes of their own that nothing cuts, or lead is 1.
        whole = [{c: np.arange(n) for c in ranks(mesh_shape)} for n in shape[:lead]]
        held, lead = ([*whole, *held[1:]] if lead > 1 else held), 1
    return Layout(shape, mesh_shape, tuple(placements), lead, tuple(held))


def _cut_axis(
    draw: st.DrawFn,
    size: int,
    dims: tuple[int, ...],
    mesh_dims: list[int],
    mesh_shape: tuple[int, ...],
    placements: list[Any],
    ragged: bool,
) -> Indices:
    """Draw the placements of ``mesh_dims``, which all cut one axis, and cut its indices by hand."""
    first_dim = dims[0]
    strided = [d for d in mesh_dims if draw(st.booleans())]
    turns = [d for d in mesh_dims if d not in strided] + strided[::-1]
    held: Indices = {(): np.arange(size)}  # by the indices of the turns so far
    for turn, mesh_dim in enumerate(turns):
        parts = mesh_shape[mesh_dim]
        later = math.prod(mesh_shape[d] for d in turns[:turn] if d > mesh_dim)
        # Blocks are the ones that later mesh dims made; where there are none, any number may be stated.
        alone = mesh_dim in strided and later == 1
        split = draw(st.integers(2, 4)) if alone else (later if mesh_dim in strided else 1)
        is_ragged = ragged and (len(dims) > 1 or draw(st.booleans()))
        unlike = is_ragged and split > 1 and not any(d < mesh_dim for d in turns[:turn]) and draw(st.booleans())
        if is_ragged:
            units, cut = _ragged_cut(draw, held, parts, split, alone, unlike)
            is_strided = split > 1 or draw(st.booleans())
            placements[mesh_dim] = RaggedStridedShard(dims, units, split) if is_strided else RaggedShard(dims, units)
        else:
            placements[mesh_dim] = StridedShard(first_dim, split) if split > 1 else Shard(first_dim)
            cut = {key: _parts_of(_chunks(rows, split if alone else 1), parts) for key, rows in held.items()}
        held = {(*key, index): rows for key, all_parts in cut.items() for index, rows in enumerate(all_parts)}
    return {c: held[tuple(c[d] for d in turns)] for c in ranks(mesh_shape)}


def _ragged_cut(
    draw: st.DrawFn, held: Indices, parts: int, split: int, alone: bool, unlike: bool
) -> tuple[tuple[int, ...], dict[tuple[int, ...], list[np.ndarray]]]:
    """Units that fit the rows held so far, and the parts that they make of them."""
    blocks = {key: _chunks(rows, split if alone else 1) for key, rows in held.items()}
    lengths = [len(block) for of_key in blocks.values() for block in of_key]
    if not unlike:
        units = draw(compositions(draw(divisors(math.gcd(*lengths))), parts))
        return units, {key: _parts_of(of_key, parts, [units] * split) for key, of_key in blocks.items()}
    if alone:  # one key at most has rows: no earlier mesh dim cuts, and the later ones are of size 1
        ((key, rows),) = held.items()
        shares = draw(compositions(draw(divisors(len(rows))), split))
        per_block = [draw(compositions(share, parts)) for share in shares]
        of_key = _proportions(rows, shares)
        return tuple(itertools.chain(*per_block)), {key: _parts_of(of_key, parts, per_block)}
    step = draw(divisors(math.gcd(*lengths)))
    shares = [length // step for length in lengths] if any(lengths) else [2] + [0] * (len(lengths) - 1)
    per_block = [draw(compositions(share, parts)) for share in shares]
    made = zip(blocks.items(), per_block, strict=True)
    return tuple(itertools.chain(*per_block)), {key: _parts_of(b, parts, [units]) for (key, b), units in made}


def _chunks(rows: np.ndarray, parts: int) -> list[np.ndarray]:
    """Chunks of ``ceil(n / parts)``: take that many rows until none are left."""
    size = -(-len(rows) // parts)
    return [rows[i * size : (i + 1) * size] for i in range(parts)]


def _proportions(rows: np.ndarray, units: tuple[int, ...]) -> list[np.ndarray]:
    per_unit = len(rows) // max(sum(units), 1)
    return np.split(rows, np.cumsum(units)[:-1] * per_unit)


def _parts_of(blocks: list[np.ndarray], parts: int, units: list[tuple[int, ...]] | None = None) -> list[np.ndarray]:
    """Part i of every block, joined, for every i."""
    if units is None:
        cut = [_chunks(block, parts) for block in blocks]
    else:
        cut = [_proportions(block, of_block) for block, of_block in zip(blocks, units, strict=False)]
    return [np.concatenate([of_block[i] for of_block in cut]) for i in range(parts)]


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index of a numpy array or a tensor."""
    return tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    """An array whose elements tell where they are."""
    return np.arange(math.prod(shape)).reshape(shape)
