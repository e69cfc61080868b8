"""Cuts of mesh dims: every element is held once by each replica, in an order that can be read back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard as TorchStridedShard

from layouts import Layout, layouts, numbered, ranks, slices
from raggedshard.cuts import Cut, Piece, check_cuts, local_pieces, local_shape
from raggedshard.geometry import (
    Box,
    Run,
    chunk_lengths,
    strided_blocks,
)
from raggedshard.placements import check_placements, cut_of, global_pieces, shape_of

bounded = settings(derandomize=True, deadline=None, max_examples=600, database=None)


def rows_of(rows: int, mesh_shape: tuple[int, ...], *cuts: Cut | None) -> list[list[int]]:
    """The rows that each rank holds of a 1-d tensor."""
    held = []
    for coordinate in ranks(mesh_shape):
        boxes = [piece.box for piece in local_pieces((rows,), mesh_shape, cuts, coordinate)]
        held.append([row for box in boxes for row in range(box.offsets[0], box.offsets[0] + box.sizes[0])])
    return held


# Any layout


@bounded
@given(layouts())
def test_boxes_of_all_ranks_cover_every_element_once_per_replica(layout: Layout) -> None:
    count = np.zeros(layout.shape, dtype=int)
    for pieces in global_pieces(layout.shape, layout.mesh_shape, layout.placements).values():
        for piece in pieces:
            count[slices(piece.box)] += 1
    assert (count == layout.copies).all()


@bounded
@given(layouts())
def test_pieces_tile_the_local_tensor_and_numels_agree(layout: Layout) -> None:
    for coordinate, pieces in global_pieces(layout.shape, layout.mesh_shape, layout.placements).items():
        shape = shape_of(layout.shape, layout.mesh_shape, layout.placements, coordinate)
        count = np.zeros(shape, dtype=int)
        for piece in pieces:
            assert piece.box.numel == piece.local.numel > 0
            count[slices(piece.local)] += 1
        assert (count == 1).all()
        assert math.prod(shape) == sum(piece.box.numel for piece in pieces)


@bounded
@given(layouts())
def test_writing_by_pieces_gives_numpys_selection_and_reading_back_gives_the_global_tensor(layout: Layout) -> None:
    source, result = numbered(layout.shape), np.full(layout.shape, -1)
    for coordinate, pieces in global_pieces(layout.shape, layout.mesh_shape, layout.placements).items():
        local = np.full(shape_of(layout.shape, layout.mesh_shape, layout.placements, coordinate), -1)
        for piece in pieces:
            local[slices(piece.local)] = source[slices(piece.box)].reshape(piece.local.sizes)
        np.testing.assert_array_equal(local, layout.local_of(source, coordinate))
        for piece in pieces:
            result[slices(piece.box)] = local[slices(piece.local)].reshape(piece.box.sizes)
    np.testing.assert_array_equal(result, source)


@bounded
@given(layouts())
def test_a_layout_that_fits_is_accepted(layout: Layout) -> None:
    check_placements(layout.shape, layout.mesh_shape, layout.placements)


@st.composite
def careless_layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Cut | None]]:
    """Cuts that often fit neither the shape nor one another."""
    mesh_shape = tuple(draw(st.sampled_from([1, 2, 3])) for _ in range(draw(st.sampled_from([1, 2, 3]))))
    shape = tuple(draw(st.sampled_from([12, 8, 6, 5, 1, 0])) for _ in range(draw(st.sampled_from([1, 1, 1, 2, 0]))))

    def one(parts: int) -> Cut | None:
        kind = draw(st.sampled_from(["whole", "chunks", "units", "units", "units"]))
        if kind == "whole":
            return None
        split = draw(st.sampled_from([1, 1, 2, 3, 4]))
        if kind == "chunks":
            return Cut((draw(st.sampled_from([0, 0, 1])),), None, split)
        count = parts * draw(st.sampled_from([1, 1, 1, split]))
        units = tuple(draw(st.sampled_from([1, 1, 2, 0])) for _ in range(count))
        return Cut(draw(st.sampled_from([(0,), (0,), (0,), (0, 1)])), units, split)

    return shape, mesh_shape, [one(parts) for parts in mesh_shape]


@settings(bounded, max_examples=1500)
@given(careless_layouts())
@example(((5,), (3, 2), [Cut(units=(2, 1, 2)), Cut(units=(1, 1))]))  # only the middle rank's row does not divide
@example(((5,), (4, 2), [Cut(), Cut(units=(1, 1))]))
def test_cuts_are_refused_if_any_coordinate_cannot_be_cut_and_cover_once_otherwise(layout: Any) -> None:
    shape, mesh_shape, cuts = layout
    try:
        check_cuts(shape, mesh_shape, cuts)
    except ValueError:
        with pytest.raises(ValueError):
            for coordinate in ranks(mesh_shape):
                local_pieces(shape, mesh_shape, cuts, coordinate)
        return
    count = np.zeros(shape, dtype=int)
    for coordinate in ranks(mesh_shape):
        for piece in local_pieces(shape, mesh_shape, cuts, coordinate):
            count[slices(piece.box)] += 1
    assert (count == math.prod(n for n, cut in zip(mesh_shape, cuts, strict=True) if cut is None)).all()


def test_two_shards_of_one_dim_are_torchs_shard_of_the_shard() -> None:
    for rows in range(18):
        expected = []
        for i in range(3):
            length, offset = TorchShard.local_shard_size_and_offset(rows, 3, i)
            for j in range(2):
                inner, start = TorchShard.local_shard_size_and_offset(length, 2, j)
                expected.append(list(range(offset + start, offset + start + inner)))
        assert rows_of(rows, (3, 2), Cut(), Cut()) == expected


# Strided cuts


@pytest.mark.parametrize("rows", range(18))
@pytest.mark.parametrize("split", [2, 3, 4])
@pytest.mark.parametrize("parts", range(1, 5))
def test_a_strided_cut_on_its_own_is_torchs_strided_shard(rows: int, split: int, parts: int) -> None:
    strided = TorchStridedShard(0, split_factor=split)
    shards, _ = strided._split_tensor(torch.arange(rows), parts, with_padding=False, contiguous=False)
    assert rows_of(rows, (parts,), Cut(split_factor=split)) == [shard.tolist() for shard in shards]
    for index, shard in enumerate(shards):
        length, offset = strided.local_shard_size_and_offset(rows, parts, index)
        assert local_shape((rows,), (parts,), [Cut(split_factor=split)], (index,)) == (length,)
        if length:
            assert offset == shard[0]


@pytest.mark.parametrize("split", [2, 3])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_a_strided_cut_before_a_shard_is_torchs_when_all_is_even(split: int, parts: int) -> None:
    # Uneven, torch chunks what the strided rank holds and not the blocks: of 7 rows on 3 x 2, blocks 0-3 and 4-6,
    # row 6 goes to the rank of the first block.
    rows = 2 * split * parts
    strided = TorchStridedShard(0, split_factor=split)
    expected = []
    for shard in strided._split_tensor(torch.arange(rows), parts, with_padding=False, contiguous=False)[0]:
        expected += [chunked.tolist() for chunked in shard.chunk(split)]
    assert rows_of(rows, (parts, split), Cut(split_factor=split), Cut()) == expected


def test_5_rows_split_2_shards_2() -> None:
    # blocks 0 1 2 | 3 4, each cut in two: 0 1 | 2 and 3 | 4
    assert rows_of(5, (2,), Cut(split_factor=2)) == [[0, 1, 3], [2, 4]]
    assert rows_of(5, (2, 2), Cut(split_factor=2), Cut()) == [[0, 1], [3], [2], [4]]
    assert rows_of(5, (2, 2), Cut((0,), (2, 1, 1, 1), 2), Cut()) == [[0, 1], [3], [2], [4]]


def test_parts_of_neighbouring_blocks_that_touch_are_one_piece() -> None:
    whole = Box((0,), (5,))
    assert local_pieces((5,), (1,), [Cut(split_factor=2)], (0,)) == (Piece(whole, whole),)


def test_7_rows_tp_2_fsdp_2_are_blocks_of_4_and_3_rows() -> None:
    assert strided_blocks(7, (2,)) == (Run(0, 4), Run(4, 3))
    assert [chunk_lengths(block.length, 2) for block in strided_blocks(7, (2,))] == [(2, 2), (2, 1)]
    cut = Cut((0,), (2, 2, 2, 1), split_factor=2)
    # (fsdp, tp): 0,0  0,1  1,0  1,1
    assert rows_of(7, (2, 2), cut, Cut()) == [[0, 1], [4, 5], [2, 3], [6]]
    # gathered over TP, each FSDP rank holds its part of both blocks
    assert rows_of(7, (2, 2), cut, None) == [[0, 1, 4, 5], [0, 1, 4, 5], [2, 3, 6], [2, 3, 6]]


def test_50257_rows_on_3_by_2() -> None:
    # TP 2: 25129 + 25128; FSDP 3 of them: 8377 8377 8375 and 8376 8376 8376
    blocks = strided_blocks(50257, (2,))
    assert blocks == (Run(0, 25129), Run(25129, 25128))
    units = (8377, 8377, 8375, 8376, 8376, 8376)
    assert sum((chunk_lengths(block.length, 3) for block in blocks), ()) == units
    cuts = [Cut((0,), units, split_factor=2), Cut()]
    held = [local_pieces((50257, 8), (3, 2), cuts, c)[0].box for c in ranks((3, 2))]
    starts, lengths = (0, 25129, 8377, 33505, 16754, 41881), (8377, 8376, 8377, 8376, 8375, 8376)
    assert held == [Box((start, 0), (length, 8)) for start, length in zip(starts, lengths, strict=True)]
    # the same mesh, both dims chunking in mesh order: 16753 16753 16751, each in two
    plain = [local_shape((50257, 8), (3, 2), [Cut(), Cut()], c) for c in ranks((3, 2))]
    assert plain == [(8377, 8), (8376, 8), (8377, 8), (8376, 8), (8376, 8), (8375, 8)]


@bounded
@given(st.integers(0, 40), st.lists(st.integers(1, 4), max_size=3))
def test_strided_blocks_are_consecutive_and_are_what_shards_in_mesh_order_hold(rows: int, parts: list[int]) -> None:
    blocks = strided_blocks(rows, parts)
    assert np.concatenate([np.arange(b.start, b.stop) for b in blocks]).tolist() == list(range(rows))
    held = rows_of(rows, tuple(parts), *(Cut() for _ in parts))
    assert [list(range(b.start, b.stop)) for b in blocks] == held


# Ragged cuts


def test_ragged_over_two_leading_dims() -> None:
    cuts = [Cut((0, 1), (1, 2))]
    assert [local_shape((6, 4, 8), (2,), cuts, (i,)) for i in (0, 1)] == [(8, 8), (16, 8)]
    assert local_pieces((6, 4, 8), (2,), cuts, (0,)) == (Piece(Box((0, 0, 0), (2, 4, 8)), Box((0, 0), (8, 8))),)
    assert local_pieces((6, 4, 8), (2,), cuts, (1,)) == (Piece(Box((2, 0, 0), (4, 4, 8)), Box((0, 0), (16, 8))),)


def test_a_ragged_run_may_start_and_stop_within_rows() -> None:
    # 12 cells of a (3, 4) grid, units 1 2 1: cells 0-2, 3-8, 9-11
    pieces = local_pieces((3, 4, 5), (3,), [Cut((0, 1), (1, 2, 1))], (1,))
    assert [piece.box for piece in pieces] == [
        Box((0, 3, 0), (1, 1, 5)),
        Box((1, 0, 0), (1, 4, 5)),
        Box((2, 0, 0), (1, 1, 5)),
    ]
    assert [piece.local for piece in pieces] == [
        Box((0, 0), (1, 5)),
        Box((1, 0), (4, 5)),
        Box((5, 0), (1, 5)),
    ]


def test_a_rank_of_zero_units_holds_nothing_but_has_a_shape() -> None:
    cuts = [Cut((0,), (2, 0, 1))]
    assert local_shape((6, 3), (3,), cuts, (1,)) == (0, 3)
    assert local_pieces((6, 3), (3,), cuts, (1,)) == ()


def test_a_tensor_without_dims_is_one_piece_everywhere() -> None:
    assert local_shape((), (2,), [None], (1,)) == ()
    assert local_pieces((), (2,), [None], (1,)) == (Piece(Box((), ()), Box((), ())),)


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "cuts", "message"),
    [
        ((4,), (2,), [], r"0 placements for a mesh of 1 dims"),
        ((4,), (2,), [Cut((0,), (1, 1), 2), Cut()], r"2 placements for a mesh of 1 dims"),
        ((4,), (2,), [Cut((1,))], r"mesh dim 0: tensor dims \(1,\) are out of range for shape \(4,\)"),
        ((4,), (2,), [Cut((-1,))], r"mesh dim 0: tensor dims \(-1,\) are out of range for shape \(4,\)"),
        ((), (2,), [Cut()], r"mesh dim 0: tensor dims \(0,\) are out of range for shape \(\)"),
        ((4, 4), (2, 2), [None, Cut((1,), (1, 1))], r"mesh dim 1: ragged dims must be \(0, ..., k-1\), got \(1,\)"),
        ((4, 4), (2, 2), [Cut((0, 1), (1, 1)), Cut()], r"mesh dim 1: dim 0 is one of the 2 dims that another"),
        ((4, 4), (2, 2), [Cut((1,)), Cut((0, 1), (1, 1))], r"mesh dim 0: dim 1 is one of the 2 dims that another"),
        (
            (4, 4, 4),
            (2, 2),
            [Cut((0, 1, 2), (1, 1)), Cut((0, 1), (1, 1))],
            r"mesh dim 1: dim 0 is one of the 3 dims that another",
        ),
        ((6,), (2,), [Cut((0,), (1, 1, 1))], r"mesh dim 0: 3 local_units \(1, 1, 1\), expected 2$"),
        ((6,), (2,), [Cut((0,), (1, 1, 1), 2)], r"mesh dim 0: 3 local_units \(1, 1, 1\), expected 2 or 4$"),
        ((7,), (2,), [Cut((0,), (1, 1))], r"mesh dim 0: 7 cells do not divide by the sum 2 of local_units \(1, 1\)"),
        ((6,), (3, 2), [Cut((0,), (1, 2, 3)), Cut((0,), (1, 1))], r"mesh dim 1: 1 cells do not divide by the sum 2"),
        ((4,), (2,), [Cut(split_factor=0)], r"mesh dim 0: split_factor must be >= 1, got 0"),
        ((8,), (2, 4), [Cut(split_factor=2), Cut()], r"mesh dim 0: split_factor 2 is neither the 4 blocks"),
        (
            (8,),
            (2, 2, 2),
            [Cut(), Cut((0,), (1, 1, 1, 1), 2), Cut()],
            r"mesh dim 1: an earlier mesh dim cuts the same tensor dim",
        ),
        (
            (7,),
            (2, 2),
            [Cut((0,), (2, 1, 2, 2), 2), Cut()],
            r"mesh dim 0: local_units \(2, 1, 2, 2\) do not give block 0 its 4 of 7 rows",
        ),
        ((7,), (2,), [Cut((0,), (2, 1, 2, 1), 2)], r"mesh dim 0: 7 cells do not divide by the sum 6"),
    ],
)
def test_cuts_that_do_not_fit_name_the_mesh_dim(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], cuts: list[Cut | None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_cuts(shape, mesh_shape, cuts)
    with pytest.raises(ValueError, match=message):
        for coordinate in ranks(mesh_shape):
            local_pieces(shape, mesh_shape, cuts, coordinate)


def test_the_strategy_reaches_every_kind_of_cut() -> None:
    """Guards the property tests: a strategy that drew only easy layouts would prove nothing."""
    seen: set[str] = set()

    @settings(bounded, max_examples=300)
    @given(layouts())
    def look(layout: Layout) -> None:
        cuts = [cut_of(p) for p in layout.placements]
        on_dim_0 = [cut for cut in cuts if cut is not None and cut.dims[0] == 0]
        seen.update(type(p).__name__ for p in layout.placements)
        for cut, parts in zip(cuts, layout.mesh_shape, strict=True):
            if cut is not None and cut.units is not None:
                seen.add(f"{len(cut.dims)} dims")
                seen.add("units per block" if len(cut.units) != parts else "shared units")
                seen.update(["uneven units"] if len(set(cut.units)) > 1 and layout.shape[0] else [])
        if len(on_dim_0) > 2 and 0 not in layout.shape:
            seen.add("three cuts of dim 0")
        if sum(cut.units is not None for cut in on_dim_0) > 1 and 0 not in layout.shape:
            seen.add("nested ragged")

    look()
    names = {"Replicate", "Partial", "Shard", "StridedShard", "RaggedShard", "RaggedStridedShard"}
    forms = {"1 dims", "2 dims", "3 dims", "units per block", "shared units", "uneven units"}
    assert seen >= names | forms | {"three cuts of dim 0", "nested ragged"}
