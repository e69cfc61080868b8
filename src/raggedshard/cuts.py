"""What each rank holds of a tensor whose dims the dims of a mesh have cut: integers only, no framework.

Everything that the library knows about positions is worked out here, from a global shape, a mesh shape and the
cut of each mesh dim. Nothing is communicated, nothing is read from a tensor, so every rank gets the same answer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raggedshard.geometry import Box, Run, chunk, coordinates, ragged_runs, run_boxes

__all__ = ["Cut", "Piece", "check_cuts", "cut_order", "local_pieces", "local_shape"]


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


def local_shape(
    shape: Sequence[int], mesh_shape: Sequence[int], cuts: Sequence[Cut | None], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """Shape of the local tensor at a mesh coordinate; a cut over k leading dims gives ``(cells, *shape[k:])``.

    Raises:
        ValueError: as `local_pieces`.
    """
    return tuple(_length(runs) for runs in _axis_runs(shape, mesh_shape, cuts, coordinate))


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
    if not shape:
        check_cuts(shape, mesh_shape, cuts)
        return (Piece(Box((), ()), Box((), ())),)
    lead = _lead(cuts)
    pieces = []
    per_axis = [_with_local_starts(runs) for runs in _axis_runs(shape, mesh_shape, cuts, coordinate)]
    for (cells, local_start), *tail in itertools.product(*per_axis):
        offsets, sizes = [run.start for run, _ in tail], [run.length for run, _ in tail]
        for box in run_boxes(cells, shape[:lead]):
            pieces.append(
                Piece(
                    Box((*box.offsets, *offsets), (*box.sizes, *sizes)),
                    Box((local_start, *(start for _, start in tail)), (box.numel, *sizes)),
                )
            )
            local_start += box.numel
    return tuple(pieces)


def check_cuts(shape: Sequence[int], mesh_shape: Sequence[int], cuts: Sequence[Cut | None]) -> None:
    """Check that the cuts fit the shape and one another at every mesh coordinate.

    Raises:
        ValueError: they do not; the message names the mesh dim.
    """
    for size, steps in _axes(shape, mesh_shape, cuts):
        # Whether units fit depends on the rows that the steps before leave, never on the index within the step.
        last_ragged = max((i for i, step in enumerate(steps) if step.cut.units is not None), default=0)
        varied = {step.mesh_dim for step in steps[:last_ragged]}
        for coordinate in coordinates([count if d in varied else 1 for d, count in enumerate(mesh_shape)]):
            _cut_axis(size, steps, coordinate)


def cut_order(cuts: Mapping[int, Cut]) -> list[int]:
    """Mesh dims in the turns of their cuts of one axis: in mesh order first, then the strided ones from the last on.

    A strided cut is stated in front of the mesh dims whose blocks it cuts, so its turn comes after theirs.
    """
    plain = [mesh_dim for mesh_dim in sorted(cuts) if cuts[mesh_dim].split_factor == 1]
    strided = [mesh_dim for mesh_dim in sorted(cuts) if cuts[mesh_dim].split_factor != 1]
    return plain + strided[::-1]


def _with_local_starts(runs: Sequence[Run]) -> list[tuple[Run, int]]:
    starts = itertools.accumulate((run.length for run in runs), initial=0)
    return list(zip(runs, starts, strict=False))


class _Step(NamedTuple):
    """The cut that one mesh dim makes of an axis, in its turn."""

    mesh_dim: int
    parts: int
    cut: Cut
    has_blocks: bool  # the steps before made the blocks; otherwise each rank holds its part of every block
    block_units: tuple[tuple[int, ...], ...] | None  # the cut's units block by block, None when all are cut alike

    def units(self, block: int) -> tuple[int, ...] | None:
        return self.cut.units if self.block_units is None else self.block_units[block]


def _axis_runs(
    shape: Sequence[int], mesh_shape: Sequence[int], cuts: Sequence[Cut | None], coordinate: Sequence[int]
) -> list[list[Run]]:
    """Runs held along each axis of the local tensor."""
    return [_cut_axis(size, steps, coordinate) for size, steps in _axes(shape, mesh_shape, cuts)]


def _axes(shape: Sequence[int], mesh_shape: Sequence[int], cuts: Sequence[Cut | None]) -> list[tuple[int, list[_Step]]]:
    """Size and steps of each axis of the local tensor (the flattened leading dims are one axis)."""
    lead = _lead(cuts)
    _check_dims(shape, mesh_shape, cuts, lead)
    if not shape:
        return []
    axes = [(math.prod(shape[:lead]), 0), *((shape[dim], dim) for dim in range(lead, len(shape)))]
    return [(size, _steps(mesh_shape, cuts, dim)) for size, dim in axes]


def _lead(cuts: Sequence[Cut | None]) -> int:
    """The number of leading tensor dims that are flattened to cells: 1 unless a ragged cut names more."""
    return max((len(cut.dims) for cut in cuts if cut is not None and cut.units is not None), default=1)


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


def _steps(mesh_shape: Sequence[int], cuts: Sequence[Cut | None], dim: int) -> list[_Step]:
    """The cuts of an axis in their turns."""
    of_axis = {mesh_dim: cut for mesh_dim, cut in enumerate(cuts) if cut is not None and cut.dims[0] == dim}
    steps: list[_Step] = []
    for mesh_dim in cut_order(of_axis):
        cut, parts = of_axis[mesh_dim], mesh_shape[mesh_dim]
        later = math.prod(step.parts for step in steps if step.mesh_dim > mesh_dim)
        step = _Step(mesh_dim, parts, cut, later == cut.split_factor, _block_units(cut, parts))
        try:
            _check_step(step, later, has_earlier=any(before.mesh_dim < mesh_dim for before in steps))
        except ValueError as error:
            raise ValueError(f"mesh dim {mesh_dim}: {error}") from None
        steps.append(step)
    return steps


def _block_units(cut: Cut, parts: int) -> tuple[tuple[int, ...], ...] | None:
    units = cut.units
    if units is None or len(units) == parts:
        return None
    return tuple(units[start : start + parts] for start in range(0, len(units), parts))


def _check_step(step: _Step, later: int, has_earlier: bool) -> None:
    parts, cut = step.parts, step.cut
    if cut.split_factor < 1:
        raise ValueError(f"split_factor must be >= 1, got {cut.split_factor}")
    if cut.units is not None and len(cut.units) not in (parts, parts * cut.split_factor):
        want = f"{parts}" if cut.split_factor == 1 else f"{parts} or {parts * cut.split_factor}"
        raise ValueError(f"{len(cut.units)} local_units {cut.units}, expected {want}")
    if later not in (1, cut.split_factor):
        raise ValueError(
            f"split_factor {cut.split_factor} is neither the {later} blocks that later mesh dims make of the same "
            "tensor dim nor stated without any"
        )
    if step.block_units is not None and has_earlier:
        raise ValueError(
            "an earlier mesh dim cuts the same tensor dim; blocks of unlike cuts cannot be stated on top of it"
        )


def _cut_axis(size: int, steps: Sequence[_Step], coordinate: Sequence[int]) -> list[Run]:
    """What a mesh coordinate holds of an axis of ``size`` rows, after every step."""
    runs = [Run(0, size)] if size else []
    block = 0
    for step in steps:
        index = coordinate[step.mesh_dim]
        try:
            if step.has_blocks:
                parts = [_part_of_block(step, size, _length(runs), block, index)]
            else:
                parts = _part_of_every_block(step, _length(runs), index)
        except ValueError as error:
            raise ValueError(f"mesh dim {step.mesh_dim}: {error}") from None
        runs = _select(runs, parts)
        block = block * step.parts + index
    return runs


def _part_of_block(step: _Step, size: int, rows: int, block: int, index: int) -> Run:
    """Part ``index`` of the block of ``rows`` rows that the steps before made of ``size``."""
    if step.block_units is not None:
        shares = [sum(units) for units in step.block_units]
        if size * shares[block] != rows * sum(shares):
            raise ValueError(f"local_units {step.cut.units} do not give block {block} its {rows} of {size} rows")
    return _part(rows, step.parts, step.units(block), index)


def _part_of_every_block(step: _Step, rows: int, index: int) -> list[Run]:
    if step.block_units is None:
        blocks = [chunk(rows, step.cut.split_factor, block) for block in range(step.cut.split_factor)]
    else:
        blocks = ragged_runs(rows, [sum(units) for units in step.block_units])
    parts = [_part(run.length, step.parts, step.units(block), index) for block, run in enumerate(blocks)]
    return [Run(run.start + part.start, part.length) for run, part in zip(blocks, parts, strict=True)]


def _part(rows: int, parts: int, units: tuple[int, ...] | None, index: int) -> Run:
    if units is None:
        return chunk(rows, parts, index)
    if rows == 0 and not any(units):  # an empty block of a ragged cut whose other blocks have rows
        return Run(0, 0)
    return ragged_runs(rows, units)[index]


def _length(runs: Sequence[Run]) -> int:
    return sum(run.length for run in runs)


def _select(runs: Sequence[Run], parts: Sequence[Run]) -> list[Run]:
    """The sub-runs ``parts`` of the concatenation of ``runs`` as runs of the original rows, neighbours joined."""
    selected: list[Run] = []
    for part in parts:
        position = 0
        for run in runs:
            start, stop = max(part.start, position), min(part.stop, position + run.length)
            if start < stop:
                held = Run(run.start + start - position, stop - start)
                if selected and selected[-1].stop == held.start:
                    selected[-1] = Run(selected[-1].start, selected[-1].length + held.length)
                else:
                    selected.append(held)
            position += run.length
    return selected
