"""Plans from one layout to another, carried out on numpy arrays: no processes, no framework."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts import Layout, layouts, ranks
from raggedshard.cuts import Cut, Piece
from raggedshard.geometry import Box
from raggedshard.placements import cut_of
from raggedshard.transitions import gathered_mesh_dims, intersection, plan_transition

pairs = layouts().flatmap(lambda source: st.tuples(st.just(source), layouts(like=source)))
bounded = settings(max_examples=150, deadline=None, derandomize=True)


def view(local: np.ndarray, piece: Piece, box: Box) -> np.ndarray:
    held = local[tuple(slice(o, o + s) for o, s in zip(*piece.local, strict=True))].reshape(piece.box.sizes)
    starts = [o - at for o, at in zip(box.offsets, piece.box.offsets, strict=True)]
    return held[tuple(slice(o, o + s) for o, s in zip(starts, box.sizes, strict=True))]


@bounded
@given(pairs)
def test_every_rank_gets_what_the_target_gives_it_from_the_mesh_dims_of_the_plan(pair: tuple[Layout, Layout]) -> None:
    source, target = pair
    tensor = np.arange(np.prod(source.shape, dtype=int)).reshape(source.shape)
    cuts = [tuple(cut_of(p) for p in layout.placements) for layout in pair]
    for coordinate in ranks(source.mesh_shape):
        plan = plan_transition(source.shape, source.mesh_shape, cuts[0], cuts[1], coordinate)
        peers = [
            tuple(dict(zip(plan.mesh_dims, choice, strict=True)).get(d, c) for d, c in enumerate(coordinate))
            for choice in itertools.product(*(range(source.mesh_shape[d]) for d in plan.mesh_dims))
        ]
        gathered = [source.local_of(tensor, peer) for peer in peers]
        assert [local.shape for local in gathered] == list(plan.source_shapes)
        assert all(local.size <= plan.padded_numel for local in gathered)
        result = np.full(plan.target_shape, -1)
        times = np.zeros(plan.target_shape, int)
        for copy in plan.copies:
            held = view(gathered[copy.source], copy.source_piece, copy.box)
            rows = np.arange(result.size).reshape(result.shape)
            cells = view(rows, copy.target_piece, copy.box)
            result.reshape(-1)[cells] = held
            times.reshape(-1)[cells] += 1
        np.testing.assert_array_equal(result, target.local_of(tensor, coordinate))
        assert (times == 1).all()


@bounded
@given(pairs)
def test_what_stays_is_not_gathered(pair: tuple[Layout, Layout]) -> None:
    cuts = [tuple(cut_of(p) for p in layout.placements) for layout in pair]
    assert gathered_mesh_dims(cuts[0], cuts[0]) == ()
    gathered = gathered_mesh_dims(cuts[0], cuts[1])
    assert set(gathered) <= {d for d, cut in enumerate(cuts[0]) if cut is not None}
    assert set(gathered) >= {d for d, (a, b) in enumerate(zip(*cuts, strict=True)) if a is not None and a != b}


CHUNK, OTHER, RAGGED = Cut((0,)), Cut((1,)), Cut((0,), (2, 1))
STRIDED = Cut((0,), (2, 1), split_factor=2)


@pytest.mark.parametrize(
    ("source", "target", "mesh_dims"),
    [
        ((RAGGED,), (None,), (0,)),
        ((None,), (RAGGED,), ()),
        ((None, RAGGED), (None, None), (1,)),  # HSDP: replicas do not talk
        ((RAGGED, OTHER), (None, OTHER), (0,)),  # tensor parallel on another dim stays
        ((STRIDED, CHUNK), (None, CHUNK), (0,)),  # tensor parallel on the same dim, cut first: stays
        ((STRIDED, CHUNK), (STRIDED, None), (0, 1)),  # what was cut after it moves too
        ((CHUNK, CHUNK), (CHUNK, None), (1,)),
        ((CHUNK, CHUNK), (None, CHUNK), (0, 1)),
    ],
)
def test_gathered_mesh_dims_worked_out_by_hand(source: list, target: list, mesh_dims: tuple[int, ...]) -> None:
    assert gathered_mesh_dims(source, target) == mesh_dims


def test_intersection_of_boxes() -> None:
    assert intersection(Box((0, 2), (3, 4)), Box((2, 0), (5, 3))) == Box((2, 2), (1, 1))
    assert intersection(Box((0, 2), (3, 4)), Box((3, 0), (5, 3))) is None
    assert intersection(Box((), ()), Box((), ())) == Box((), ())
