"""Chunks, runs of rows and boxes: worked out by hand, by numpy and by torch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Shard as TorchShard

from layouts import divisors, numbered, slices
from raggedshard.geometry import (
    Box,
    Run,
    chunk,
    chunk_lengths,
    chunk_size,
    coordinates,
    ragged_runs,
    run_boxes,
    strided_blocks,
)

bounded = settings(derandomize=True, deadline=None, max_examples=600, database=None)


# The chunk rule


@pytest.mark.parametrize(
    ("rows", "parts", "lengths"),
    [
        (7, 4, (2, 2, 2, 1)),
        (10, 4, (3, 3, 3, 1)),
        (5, 2, (3, 2)),
        (2, 4, (1, 1, 0, 0)),
        (0, 4, (0, 0, 0, 0)),
        (1, 3, (1, 0, 0)),
        (8, 4, (2, 2, 2, 2)),
        (9, 4, (3, 3, 3, 0)),
        (50257, 4, (12565, 12565, 12565, 12562)),
    ],
)
def test_chunk_lengths_are_the_pinned_ones(rows: int, parts: int, lengths: tuple[int, ...]) -> None:
    assert chunk_lengths(rows, parts) == lengths


@bounded
@given(st.integers(0, 70), st.integers(1, 12))
def test_chunks_are_slices_of_ceil_rows_by_parts(rows: int, parts: int) -> None:
    size = math.ceil(rows / parts)
    assert chunk_size(rows, parts) == size
    start = 0
    for index in range(parts):
        run = chunk(rows, parts, index)
        assert run.start == start
        assert run.length == min(size, rows - start)
        start = run.stop
    assert start == rows


@pytest.mark.parametrize("rows", range(18))
@pytest.mark.parametrize("parts", range(1, 6))
def test_a_chunk_is_torchs_shard(rows: int, parts: int) -> None:
    for index in range(parts):
        length, offset = TorchShard.local_shard_size_and_offset(rows, parts, index)
        assert chunk(rows, parts, index) == (offset, length)


def test_strided_blocks_follow_one_chunk_rule_after_the_other() -> None:
    assert [run.length for run in strided_blocks(5, (2, 2))] == [2, 1, 1, 1]
    assert [run.length for run in strided_blocks(5, (4,))] == [2, 2, 1, 0]
    assert strided_blocks(5, ()) == (Run(0, 5),)
    assert strided_blocks(0, (2, 3)) == (Run(0, 0),) * 6


@bounded
@given(st.data(), st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any), st.integers(0, 5))
def test_ragged_runs_are_consecutive_and_in_proportion(data: st.DataObject, units: list[int], scale: int) -> None:
    cells = scale * sum(units)
    runs = ragged_runs(cells, units)
    assert [run.length for run in runs] == [scale * unit for unit in units]
    assert [run.start for run in runs] == [0, *(run.stop for run in runs[:-1])]
    assert runs[-1].stop == cells
    if cells:  # a common factor of the units changes nothing
        factor = data.draw(divisors(scale))
        assert ragged_runs(cells, [factor * unit for unit in units]) == runs


# Boxes of a run


@bounded
@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_run_boxes_cover_a_run_exactly_and_in_order(data: st.DataObject, shape: list[int]) -> None:
    cells = math.prod(shape)
    start = data.draw(st.integers(0, cells))
    run = Run(start, data.draw(st.integers(0, cells - start)))
    boxes = run_boxes(run, shape)
    grid = numbered(tuple(shape))
    covered = [cell for box in boxes for cell in grid[slices(box)].ravel().tolist()]
    assert covered == list(range(run.start, run.stop))
    assert all(box.numel > 0 for box in boxes)
    assert len(boxes) <= 2 * len(shape) - 1


def test_run_boxes_of_the_docstrings_picture() -> None:
    assert run_boxes(Run(2, 8), (4, 4)) == [Box((0, 2), (1, 2)), Box((1, 0), (1, 4)), Box((2, 0), (1, 2))]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 2)])
def test_an_empty_run_has_no_boxes(shape: tuple[int, ...]) -> None:
    assert run_boxes(Run(0, 0), shape) == []


def test_coordinates_come_in_rank_order() -> None:
    assert list(coordinates((2, 3))) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert list(coordinates(())) == [()]


def test_run_and_box_measure_themselves() -> None:
    assert Run(3, 4).stop == 7
    assert Box((0, 1), (2, 3)).numel == 6
    assert Box((), ()).numel == 1


# Errors


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ((1, -1, 2), r"local_units must be >= 0 with a positive sum, got \(1, -1, 2\)"),
        ((0, 0), r"local_units must be >= 0 with a positive sum, got \(0, 0\)"),
        ((), r"local_units must be >= 0 with a positive sum, got \(\)"),
        ((2, 2), r"7 cells do not divide by the sum 4 of local_units \(2, 2\)"),
    ],
)
def test_ragged_runs_refuse_units_that_do_not_fit(units: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ragged_runs(7, units)
