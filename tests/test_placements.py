"""Placements are values: equal, hashable, printable, immutable, and what they refuse they explain."""

from __future__ import annotations

import copy
import math
import pickle
import time
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from torch.distributed.tensor import placement_types as torch_placements

from layouts import Layout, layouts
from raggedshard import placements as neutral
from raggedshard.cuts import Cut
from raggedshard.geometry import Box, chunk_lengths, strided_blocks
from raggedshard.placements import (
    Partial,
    Replicate,
    Shard,
    StridedShard,
    check_placements,
    cut_of,
    global_pieces,
    is_ragged,
    pieces_of,
    shape_of,
)
from raggedshard.platform.torch import placements as torch_ragged

faces = pytest.mark.parametrize("face", [neutral, torch_ragged], ids=["neutral", "torch"])


def ragged_examples(face: ModuleType) -> list[Any]:
    """Placements that all differ."""
    return [
        face.RaggedShard((0,), (2, 2, 2, 1)),
        face.RaggedShard((0,), (2, 2, 1, 2)),
        face.RaggedShard((0, 1), (2, 2, 2, 1)),
        face.RaggedShard((0,), (0, 1)),
        face.RaggedStridedShard((0,), (2, 2, 2, 1), 2),
        face.RaggedStridedShard((0,), (2, 2, 2, 1), 4),
        face.RaggedStridedShard((0,), (2, 2, 2, 1), 1),
    ]


PLAIN = [Replicate(), Partial(), Partial("max"), Shard(0), Shard(1), StridedShard(0, 2), StridedShard(0, 1)]
NEUTRAL = [*PLAIN, *ragged_examples(neutral)]
ALL = [*NEUTRAL, *ragged_examples(torch_ragged)]


# Values


@pytest.mark.parametrize("placement", ALL, ids=repr)
def test_copies_are_equal_and_hash_alike(placement: Any) -> None:
    copies = [pickle.loads(pickle.dumps(placement, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for other in [*copies, copy.copy(placement), copy.deepcopy(placement), copy.deepcopy([placement])[0]]:
        assert type(other) is type(placement)
        assert other == placement
        assert hash(other) == hash(placement)
        assert repr(other) == repr(placement)
        assert cut_of(other) == cut_of(placement)


@pytest.mark.parametrize("placements", [NEUTRAL, ragged_examples(torch_ragged)], ids=["neutral", "torch"])
def test_different_placements_are_not_equal(placements: list[Any]) -> None:
    for i, one in enumerate(placements):
        assert [one == other for other in placements] == [i == j for j in range(len(placements))]
        assert one != "RaggedShard"
        assert one != None  # noqa: E711
    assert len(set(placements)) == len(placements)


def test_a_torch_ragged_placement_differs_from_torchs_own_and_from_the_neutral_one() -> None:
    ragged = torch_ragged.RaggedShard((0,), (1, 1))
    others = [torch_placements.Shard(0), torch_placements.Replicate(), neutral.RaggedShard((0,), (1, 1))]
    assert all(ragged != other and other != ragged for other in others)


@pytest.mark.parametrize("placement", NEUTRAL, ids=repr)
def test_repr_of_a_neutral_placement_evaluates_to_it(placement: Any) -> None:
    assert eval(repr(placement), dict(vars(neutral))) == placement


@pytest.mark.parametrize("placement", ragged_examples(torch_ragged), ids=repr)
def test_repr_and_fx_repr_of_a_torch_placement_evaluate_to_it(placement: Any) -> None:
    assert eval(repr(placement), dict(vars(torch_ragged))) == placement
    text, names = placement.__fx_repr__()
    assert eval(text, dict(names)) == placement


def test_repr_is_the_constructor_call() -> None:
    assert repr(neutral.RaggedShard((0,), (2, 1))) == "RaggedShard(dims=(0,), local_units=(2, 1))"
    assert (
        repr(torch_ragged.RaggedStridedShard((0,), (2, 1), 2))
        == "RaggedStridedShard(dims=(0,), local_units=(2, 1), split_factor=2)"
    )


@pytest.mark.parametrize("placement", ALL, ids=repr)
@pytest.mark.parametrize("name", ["dims", "local_units", "split_factor", "dim", "reduce_op", "new_attribute"])
def test_placements_are_immutable(placement: Any, name: str) -> None:
    before = repr(placement)
    with pytest.raises(AttributeError):
        setattr(placement, name, 3)
    with pytest.raises(AttributeError):
        delattr(placement, name)
    assert repr(placement) == before


@faces
def test_arguments_are_kept_as_tuples_of_ints(face: ModuleType) -> None:
    placement = face.RaggedStridedShard(dims=[False, True], local_units=[2, 1], split_factor=2)
    assert (placement.dims, placement.local_units, placement.split_factor) == ((0, 1), (2, 1), 2)
    assert [type(dim) for dim in placement.dims] == [int, int]
    assert face.RaggedShard(range(1), iter([1, 2])) == face.RaggedShard((0,), (1, 2))


# Kinds


@faces
def test_a_ragged_placement_is_neither_shard_nor_replicate_nor_partial(face: ModuleType) -> None:
    # is_shard() is False on purpose: torch reads `.dim` of whatever says that it is a shard.
    for placement in ragged_examples(face):
        assert is_ragged(placement)
        assert not placement.is_shard()
        assert not placement.is_shard(0)
        assert not placement.is_replicate()
        assert not placement.is_partial()
        assert not placement.is_partial("sum")


def test_plain_placements_say_what_they_are() -> None:
    assert not any(is_ragged(p) for p in PLAIN)
    assert [p.is_replicate() for p in PLAIN] == [True, False, False, False, False, False, False]
    assert [p.is_partial() for p in PLAIN] == [False, True, True, False, False, False, False]
    assert [p.is_partial("max") for p in PLAIN] == [False, False, True, False, False, False, False]
    assert [p.is_shard() for p in PLAIN] == [False, False, False, True, True, True, True]
    assert [p.is_shard(1) for p in PLAIN] == [False, False, False, False, True, False, False]


def test_torch_ragged_placements_are_torchs_and_the_neutral_kind() -> None:
    shard, strided = torch_ragged.RaggedShard((0,), (1, 1)), torch_ragged.RaggedStridedShard((0,), (1, 1), 2)
    assert isinstance(shard, torch_placements.Placement)
    assert isinstance(shard, neutral.RaggedShard)
    assert isinstance(strided, torch_placements.Placement)
    assert isinstance(strided, neutral.RaggedStridedShard)
    assert isinstance(strided, torch_ragged.RaggedShard)
    assert not isinstance(shard, neutral.RaggedStridedShard | torch_placements.Shard)


# Cuts


@faces
def test_cut_of_a_ragged_placement(face: ModuleType) -> None:
    assert cut_of(face.RaggedShard((0, 1), (1, 2))) == Cut((0, 1), (1, 2), 1)
    assert cut_of(face.RaggedStridedShard((0,), (1, 2, 3, 4), 2)) == Cut((0,), (1, 2, 3, 4), 2)


@pytest.mark.parametrize(
    ("placement", "of_torch", "cut"),
    [
        (Replicate(), torch_placements.Replicate(), None),
        (Partial(), torch_placements.Partial(), None),
        (Partial("avg"), torch_placements.Partial("avg"), None),
        (Shard(1), torch_placements.Shard(1), Cut((1,))),
        (StridedShard(1, 2), torch_placements._StridedShard(1, split_factor=2), Cut((1,), None, 2)),
    ],
)
def test_torchs_own_placements_cut_like_the_neutral_ones(placement: Any, of_torch: Any, cut: Cut | None) -> None:
    assert cut_of(placement) == cut_of(of_torch) == cut


@pytest.mark.parametrize("thing", ["Shard(0)", None, 0, (0, 1), Shard("0"), torch_placements.Placement()], ids=str)  # pyright: ignore[reportArgumentType]
def test_what_is_no_placement_is_a_type_error_that_shows_it(thing: Any) -> None:
    with pytest.raises(TypeError, match="expected Replicate, Shard, Partial or a ragged placement") as caught:
        cut_of(thing)
    assert repr(thing) in str(caught.value)
    with pytest.raises(TypeError, match="unknown placement"):
        check_placements((4,), (2,), (thing,))


# Layouts


def test_ragged_over_two_leading_dims() -> None:
    placements = (neutral.RaggedShard((0, 1), (1, 2)),)
    check_placements((6, 4, 8), (2,), placements)
    assert [shape_of((6, 4, 8), (2,), placements, (i,)) for i in (0, 1)] == [(8, 8), (16, 8)]
    assert [pieces_of((6, 4, 8), (2,), placements, (i,))[0].box.sizes for i in (0, 1)] == [(2, 4, 8), (4, 4, 8)]


@pytest.mark.parametrize("face", [neutral, torch_ragged], ids=["neutral", "torch"])
def test_hsdp_replicates_what_fsdp_cuts(face: ModuleType) -> None:
    placements = (Replicate(), face.RaggedShard((0,), (2, 2, 2, 1)))
    check_placements((7, 8), (2, 4), placements)
    boxes = {c: pieces[0].box for c, pieces in global_pieces((7, 8), (2, 4), placements).items()}
    starts, lengths = (0, 2, 4, 6), (2, 2, 2, 1)
    assert boxes == {(i, j): Box((starts[j], 0), (lengths[j], 8)) for i in range(2) for j in range(4)}


def test_tensor_parallel_on_another_dim_keeps_its_place() -> None:
    placements = (neutral.RaggedShard((0,), (2, 1)), Shard(1))
    check_placements((3, 5), (2, 2), placements)
    shapes = [shape_of((3, 5), (2, 2), placements, c) for c in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    assert shapes == [(2, 3), (2, 2), (1, 3), (1, 2)]


def test_tensor_parallel_on_the_same_dim_cuts_first() -> None:
    placements = (neutral.RaggedStridedShard((0,), (2, 2, 2, 1), split_factor=2), Shard(0))
    check_placements((7, 8), (2, 2), placements)
    boxes = {c: pieces[0].box for c, pieces in global_pieces((7, 8), (2, 2), placements).items()}
    assert boxes == {
        (0, 0): Box((0, 0), (2, 8)),
        (0, 1): Box((4, 0), (2, 8)),
        (1, 0): Box((2, 0), (2, 8)),
        (1, 1): Box((6, 0), (1, 8)),
    }


def test_units_shared_by_all_blocks_say_the_same_with_and_without_the_mesh_dim_that_made_them() -> None:
    # 6 rows, TP 4 makes 2 2 2 0; each block is halved
    strided = neutral.RaggedStridedShard((0,), (1, 1), split_factor=4)
    for placements in [(strided, Shard(0)), (strided, Replicate())]:
        check_placements((6,), (2, 4), placements)
    assert [pieces_of((6,), (2, 4), (strided, Shard(0)), (1, j)) != () for j in range(4)] == [True, True, True, False]
    starts = [piece.box.offsets for piece in pieces_of((6,), (2, 4), (strided, Replicate()), (1, 0))]
    assert starts == [(1,), (3,), (5,)]


@settings(derandomize=True, deadline=None, max_examples=150, database=None)
@given(layouts())
def test_torch_placements_give_the_pieces_of_the_neutral_ones(layout: Layout) -> None:
    of_torch = [to_torch(p) for p in layout.placements]
    expected = global_pieces(layout.shape, layout.mesh_shape, layout.placements)
    assert global_pieces(layout.shape, layout.mesh_shape, of_torch) == expected
    check_placements(layout.shape, layout.mesh_shape, of_torch)


def to_torch(placement: Any) -> Any:
    if isinstance(placement, neutral.RaggedStridedShard):
        return torch_ragged.RaggedStridedShard(placement.dims, placement.local_units, placement.split_factor)
    if isinstance(placement, neutral.RaggedShard):
        return torch_ragged.RaggedShard(placement.dims, placement.local_units)
    if isinstance(placement, StridedShard):
        return torch_placements._StridedShard(placement.dim, split_factor=placement.split_factor)
    if isinstance(placement, Shard):
        return torch_placements.Shard(placement.dim)
    return torch_placements.Partial() if placement.is_partial() else torch_placements.Replicate()


# Errors


@faces
@pytest.mark.parametrize("kind", ["RaggedShard", "RaggedStridedShard"])
@pytest.mark.parametrize(
    ("dims", "units", "message"),
    [
        ((), (1, 1), r"dims must be \(0, ..., k-1\), got \(\)"),
        ((1,), (1, 1), r"dims must be \(0, ..., k-1\), got \(1,\)"),
        ((1, 0), (1, 1), r"dims must be \(0, ..., k-1\), got \(1, 0\)"),
        ((0, 0), (1, 1), r"dims must be \(0, ..., k-1\), got \(0, 0\)"),
        ((-1,), (1, 1), r"dims must be \(0, ..., k-1\), got \(-1,\)"),
        ((0,), (), r"local_units must be ints >= 0 with a positive sum, got \(\)"),
        ((0,), (0, 0), r"local_units must be ints >= 0 with a positive sum, got \(0, 0\)"),
        ((0,), (2, -1), r"local_units must be ints >= 0 with a positive sum, got \(2, -1\)"),
        ((0,), (1.0, 1), r"local_units must be ints >= 0 with a positive sum, got \(1.0, 1\)"),
        ((0,), (True, 1), r"local_units must be ints >= 0 with a positive sum, got \(True, 1\)"),
        ((0,), "11", r"local_units must be ints >= 0 with a positive sum, got \('1', '1'\)"),
    ],
)
def test_arguments_that_break_the_rules(face: ModuleType, kind: str, dims: Any, units: Any, message: str) -> None:
    arguments = (dims, units) if kind == "RaggedShard" else (dims, units, 2)
    with pytest.raises(ValueError, match=f"^{kind}: {message}$"):
        getattr(face, kind)(*arguments)


@faces
@pytest.mark.parametrize("split_factor", [0, -2, 2.0, True, None])
def test_split_factors_that_break_the_rules(face: ModuleType, split_factor: Any) -> None:
    with pytest.raises(ValueError, match=f"RaggedStridedShard: split_factor must be an int >= 1, got {split_factor}"):
        face.RaggedStridedShard((0,), (1, 1), split_factor)


@faces
@pytest.mark.parametrize("dims_and_units", [(0, (1, 1)), ((0,), 2)])
def test_dims_and_units_that_are_no_sequences_are_a_type_error(face: ModuleType, dims_and_units: Any) -> None:
    with pytest.raises(TypeError):
        face.RaggedShard(*dims_and_units)


@faces
@pytest.mark.parametrize(
    ("shape", "mesh_shape", "kind", "arguments", "words"),
    [
        ((7, 8), (4,), "RaggedShard", ((0,), (2, 2, 3)), ["mesh dim 0", "(7, 8)", "3 local_units (2, 2, 3)"]),
        ((7, 8), (2,), "RaggedShard", ((0,), (2, 2)), ["mesh dim 0", "(7, 8)", "7 cells", "sum 4", "(2, 2)"]),
        ((8,), (2,), "RaggedShard", ((0, 1), (1, 1)), ["mesh dim 0", "(8,)", "dims (0, 1) are out of range"]),
        ((), (2,), "RaggedShard", ((0,), (1, 1)), ["mesh dim 0", "()", "out of range"]),
        ((9,), (2,), "RaggedStridedShard", ((0,), (1, 1, 1), 2), ["mesh dim 0", "(1, 1, 1)", "expected 2 or 4"]),
    ],
)
def test_a_ragged_placement_that_does_not_fit_names_mesh_dim_shape_and_units(
    face: ModuleType,
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    kind: str,
    arguments: tuple[Any, ...],
    words: list[str],
) -> None:
    placement = getattr(face, kind)(*arguments)
    with pytest.raises(ValueError) as caught:
        check_placements(shape, mesh_shape, (placement,))
    message = str(caught.value)
    assert repr(placement) in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "placements", "words"),
    [
        ((8,), (2,), (Shard(0), Shard(0)), ["2 placements for a mesh of 1 dims"]),
        ((8,), (2, 2), (neutral.RaggedStridedShard((0,), (1, 1), 2),), ["1 placements for a mesh of 2 dims"]),
        ((8,), (2, 2), (Replicate(), Shard(1)), ["mesh dim 1", "(1,) are out of range"]),
        ((8,), (2,), (Shard(-1),), ["mesh dim 0", "(-1,) are out of range"]),
        ((8,), (2,), (StridedShard(0, 0),), ["mesh dim 0", "split_factor must be >= 1"]),
        ((4, 4), (2, 2), (neutral.RaggedShard((0, 1), (1, 1)), Shard(0)), ["mesh dim 1", "flattens"]),
        ((8,), (2, 4), (StridedShard(0, 2), Shard(0)), ["mesh dim 0", "the 4 blocks"]),
        ((7,), (2, 2), (neutral.RaggedStridedShard((0,), (1, 2), 2), Shard(0)), ["mesh dim 0", "4 cells", "sum 3"]),
        ((7,), (2, 2), (neutral.RaggedStridedShard((0,), (2, 1, 2, 2), 2), Shard(0)), ["block 0 its 4 of 7 rows"]),
        (
            (8,),
            (2, 2, 2),
            (Shard(0), neutral.RaggedStridedShard((0,), (1, 1, 1, 1), 2), Shard(0)),
            ["mesh dim 1", "earlier mesh dim"],
        ),
        # only the middle rank of the first mesh dim has a row that cannot be halved
        (
            (5,),
            (3, 2),
            (neutral.RaggedShard((0,), (2, 1, 2)), neutral.RaggedShard((0,), (1, 1))),
            ["mesh dim 1", "1 cells"],
        ),
    ],
)
def test_placements_that_contradict_the_shape_or_one_another(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Any, ...], words: list[str]
) -> None:
    for _ in range(2):  # a refusal is not remembered as an acceptance
        with pytest.raises(ValueError) as caught:
            check_placements(shape, mesh_shape, placements)
        message = str(caught.value)
        assert message.startswith(f"placements {placements} do not fit shape {shape}: ")
        assert all(word in message for word in words), message


# Speed


def test_checking_a_large_mesh_takes_well_under_a_millisecond() -> None:
    # 50257 rows, TP 8 then FSDP 128: asked for every tensor that is made
    units = tuple(n for block in strided_blocks(50257, (8,)) for n in chunk_lengths(block.length, 128))
    placements = (torch_ragged.RaggedStridedShard((0,), units, 8), torch_placements.Shard(0))
    shape, mesh_shape = (50257, 4096), (128, 8)
    assert sum(units) == 50257
    assert math.prod(mesh_shape) == len(units)
    start = time.perf_counter()
    for _ in range(200):
        check_placements(shape, mesh_shape, placements)
    assert (time.perf_counter() - start) / 200 < 1e-3
