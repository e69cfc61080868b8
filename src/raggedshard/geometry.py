"""Who holds which rows: integers only, no framework.

Everything that the library knows about positions is worked out here, from a global shape, a mesh shape and the
cuts of each mesh dim. Nothing is communicated, nothing is read from a tensor, so every rank gets the same answer.

    rows    0 1 | 2 3 | 4 5 | 6 .      (7, 8) on 4 ranks: chunk size 2, actual 2 2 2 1, padded 2 2 2 2
    rank     0     1     2     3
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "Box",
    "Cut",
    "Piece",
    "Run",
    "chunk",
    "chunk_lengths",
    "chunk_size",
    "coordinates",
    "local_pieces",
    "local_shape",
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


class Piece(NamedTuple):
    """A rectangle of the global tensor and the rectangle of the local tensor that stores it.

    Both have the same number of elements in the same row-major order; their ranks differ when a ragged cut
    flattens several leading dims into one.
    """

    box: Box
    local: Box


@dataclass(frozen=True)
class Cut:
    """How one mesh dim cuts a tensor.

    Args:
        dims: the tensor dims that are cut: ``(d,)``, or ``(0, ..., k-1)`` flattened to cells when ``units`` is given.
        units: the share of each rank (ragged), or ``None`` for equal chunks of ``ceil(n / parts)``.
        split_factor: the number of blocks that later mesh dims make first; 1 when this cut comes in mesh order.
    """

    dims: tuple[int, ...] = (0,)
    units: tuple[int, ...] | None = None
    split_factor: int = 1


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
    total = sum(units)
    if total <= 0 or min(units) < 0:
        raise ValueError(f"local_units must be >= 0 with a positive sum, got {tuple(units)}")
    if cells % total:
        raise ValueError(f"{cells} cells do not divide by the sum {total} of local_units {tuple(units)}")
    scale = cells // total
    starts = itertools.accumulate(units, initial=0)
    return tuple(Run(start * scale, unit * scale) for start, unit in zip(starts, units, strict=False))


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


def local_shape(
    shape: Sequence[int], mesh_shape: Sequence[int], cuts: Sequence[Cut | None], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """Shape of the local tensor at a mesh coordinate; a cut over k leading dims gives ``(cells, *shape[k:])``."""
    return tuple(sum(run.length for run in runs) for runs in _axis_runs(shape, mesh_shape, cuts, coordinate))


def local_pieces(
    shape: Sequence[int], mesh_shape: Sequence[int], cuts: Sequence[Cut | None], coordinate: Sequence[int]
) -> tuple[Piece, ...]:
    """What a mesh coordinate holds: pieces in the order of the local tensor, none when it holds nothing.

    Args:
        shape: the global shape.
        mesh_shape: ranks per mesh dim.
        cuts: one per mesh dim; ``None`` where every rank of the dim holds the same.
        coordinate: one index per mesh dim.

    Raises:
        ValueError: the cuts do not fit the shape or one another; the message names the mesh dim.
    """
    lead = _lead(cuts)
    pieces = []
    per_axis = [_with_local_starts(runs) for runs in _axis_runs(shape, mesh_shape, cuts, coordinate)]
    for combination in itertools.product(*per_axis):
        if any(run.length == 0 for run, _ in combination):
            continue
        tail = [run for run, _ in combination[1:]]
        tail_start = [start for _, start in combination[1:]]
        if not combination:  # a 0-d tensor
            pieces.append(Piece(Box((), ()), Box((), ())))
            continue
        cells, local_start = combination[0]
        for box in run_boxes(cells, shape[:lead]):
            pieces.append(
                Piece(
                    Box((*box.offsets, *(r.start for r in tail)), (*box.sizes, *(r.length for r in tail))),
                    Box((local_start, *tail_start), (box.numel, *(r.length for r in tail))),
                )
            )
            local_start += box.numel
    return tuple(pieces)


def _with_local_starts(runs: Sequence[Run]) -> list[tuple[Run, int]]:
    starts = itertools.accumulate((run.length for run in runs), initial=0)
    return list(zip(runs, starts, strict=False))


def _lead(cuts: Sequence[Cut | None]) -> int:
    """The number of leading tensor dims that are flattened to cells: 1 unless a ragged cut names more."""
    return max((len(cut.dims) for cut in cuts if cut is not None and cut.units is not None), default=1)


def _axis_runs(
    shape: Sequence[int], mesh_shape: Sequence[int], cuts: Sequence[Cut | None], coordinate: Sequence[int]
) -> list[list[Run]]:
    """Runs held along each axis of the local tensor (the flattened leading dims are one axis)."""
    lead = _lead(cuts)
    _check_dims(shape, mesh_shape, cuts, lead)
    sizes = [math.prod(shape[:lead]), *shape[lead:]] if shape else []
    return [_cut_axis(size, mesh_shape, _cuts_of_axis(cuts, axis, lead), coordinate) for axis, size in enumerate(sizes)]


def _check_dims(shape: Sequence[int], mesh_shape: Sequence[int], cuts: Sequence[Cut | None], lead: int) -> None:
    if len(cuts) != len(mesh_shape):
        raise ValueError(f"{len(cuts)} placements for a mesh of {len(mesh_shape)} dims")
    for mesh_dim, cut in enumerate(cuts):
        if cut is None:
            continue
        if max(cut.dims) >= len(shape) or min(cut.dims) < 0:
            raise ValueError(f"mesh dim {mesh_dim}: tensor dims {cut.dims} are out of range for shape {tuple(shape)}")
        if cut.units is not None and cut.dims != tuple(range(len(cut.dims))):
            raise ValueError(f"mesh dim {mesh_dim}: ragged dims must be (0, ..., k-1), got {cut.dims}")
        flattened = len(cut.dims) if cut.units is not None else 1
        if lead > 1 and min(cut.dims) < lead and flattened != lead:
            raise ValueError(
                f"mesh dim {mesh_dim}: dim {cut.dims[0]} is one of the {lead} dims that another placement flattens"
            )


def _cuts_of_axis(cuts: Sequence[Cut | None], axis: int, lead: int) -> dict[int, Cut]:
    """Mesh dim -> cut, for the cuts of one axis of the local tensor."""
    first_dim = 0 if axis == 0 else axis + lead - 1
    return {mesh_dim: cut for mesh_dim, cut in enumerate(cuts) if cut is not None and cut.dims[0] == first_dim}


def _cut_axis(size: int, mesh_shape: Sequence[int], cuts: dict[int, Cut], coordinate: Sequence[int]) -> list[Run]:
    """Apply the cuts of one axis: those in mesh order first, then the strided ones from the last to the first.

    A strided cut is stated in front of the mesh dims whose blocks it cuts, so it is applied after them.
    """
    runs = [Run(0, size)]
    block = 0
    done: list[int] = []
    ordered = sorted(d for d in cuts if cuts[d].split_factor == 1) + sorted(
        (d for d in cuts if cuts[d].split_factor != 1), reverse=True
    )
    for mesh_dim in ordered:
        cut, parts, index = cuts[mesh_dim], mesh_shape[mesh_dim], coordinate[mesh_dim]
        if cut.split_factor == 1:
            runs = _select(runs, _part(_length(runs), parts, index, cut, 0, mesh_dim))
        else:
            runs = _cut_strided(runs, size, mesh_dim, cut, parts, index, done, block, mesh_shape)
        block = block * parts + index
        done.append(mesh_dim)
    return runs


def _cut_strided(
    runs: list[Run],
    size: int,
    mesh_dim: int,
    cut: Cut,
    parts: int,
    index: int,
    done: list[int],
    block: int,
    mesh_shape: Sequence[int],
) -> list[Run]:
    """Cut ``runs`` by a strided cut, after the mesh dims ``done``."""
    later = math.prod(mesh_shape[d] for d in done if d > mesh_dim)
    per_block_units = cut.units is not None and len(cut.units) != parts
    if per_block_units and any(d < mesh_dim for d in done):
        raise ValueError(
            f"mesh dim {mesh_dim}: an earlier mesh dim cuts the same tensor dim; blocks of unlike cuts "
            "cannot be stated on top of it"
        )
    if later == cut.split_factor:
        part = _part(_length(runs), parts, index, cut, block, mesh_dim)
        if (
            per_block_units
            and cut.units is not None
            and size * _block_units(cut, parts, block) != part.total * sum(cut.units)
        ):
            raise ValueError(
                f"mesh dim {mesh_dim}: local_units {cut.units} do not give block {block} its "
                f"{part.total} of {size} rows"
            )
        return _select(runs, part)
    if later != 1:
        raise ValueError(
            f"mesh dim {mesh_dim}: split_factor {cut.split_factor} is neither the {later} blocks that later mesh "
            "dims make of the same tensor dim nor stated without any"
        )
    return _cut_every_block(runs, mesh_dim, cut, parts, index)


class _Part(NamedTuple):
    """A run within ``total`` rows."""

    run: Run
    total: int


def _part(total: int, parts: int, index: int, cut: Cut, block: int, mesh_dim: int) -> _Part:
    """The part ``index`` of ``total`` rows under a cut; ``block`` picks the units of one block."""
    if cut.units is None:
        return _Part(chunk(total, parts, index), total)
    _check_unit_count(cut, parts, mesh_dim)
    units = cut.units if len(cut.units) == parts else cut.units[block * parts : (block + 1) * parts]
    if sum(units) == 0 and total == 0:
        return _Part(Run(0, 0), 0)
    try:
        return _Part(ragged_runs(total, units)[index], total)
    except ValueError as error:
        raise ValueError(f"mesh dim {mesh_dim}: {error}") from None


def _check_unit_count(cut: Cut, parts: int, mesh_dim: int) -> None:
    assert cut.units is not None
    if len(cut.units) not in (parts, parts * cut.split_factor):
        want = f"{parts}" if cut.split_factor == 1 else f"{parts} or {parts * cut.split_factor}"
        raise ValueError(f"mesh dim {mesh_dim}: {len(cut.units)} local_units {cut.units}, expected {want}")


def _block_units(cut: Cut, parts: int, block: int) -> int:
    assert cut.units is not None
    return sum(cut.units[block * parts : (block + 1) * parts])


def _cut_every_block(runs: list[Run], mesh_dim: int, cut: Cut, parts: int, index: int) -> list[Run]:
    """No later mesh dim makes the blocks, so this rank holds its part of each of them."""
    total, blocks = _length(runs), cut.split_factor
    if cut.units is None:
        lengths = chunk_lengths(total, blocks)
    else:
        _check_unit_count(cut, parts, mesh_dim)
        unit_sums = [_block_units(cut, parts, b) for b in range(blocks)] if len(cut.units) != parts else [1] * blocks
        try:
            lengths = tuple(run.length for run in ragged_runs(total, unit_sums))
        except ValueError as error:
            raise ValueError(f"mesh dim {mesh_dim}: {error}") from None
    held: list[Run] = []
    start = 0
    for block, length in enumerate(lengths):
        part = _part(length, parts, index, cut, block, mesh_dim).run
        held += _select(runs, _Part(Run(start + part.start, part.length), total))
        start += length
    return _merge(held)


def _length(runs: Sequence[Run]) -> int:
    return sum(run.length for run in runs)


def _select(runs: Sequence[Run], part: _Part) -> list[Run]:
    """The sub-run ``part.run`` of the concatenation of ``runs``, as runs of the original rows."""
    selected = []
    position = 0
    for run in runs:
        start = max(part.run.start, position)
        stop = min(part.run.stop, position + run.length)
        if start < stop:
            selected.append(Run(run.start + start - position, stop - start))
        position += run.length
    return selected


def _merge(runs: Sequence[Run]) -> list[Run]:
    """Join neighbours that touch."""
    merged: list[Run] = []
    for run in runs:
        if merged and merged[-1].stop == run.start:
            merged[-1] = Run(merged[-1].start, merged[-1].length + run.length)
        else:
            merged.append(run)
    return merged
