"""Checkpoint files without a framework: round trips between layouts, what is in the files, faults that are found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from checkpoints import UNITS, load, numbered, on_ranks, row_layout, row_parts, save
from layouts import Layout, layouts, ranks
from raggedshard.checkpoint import CheckpointError, TensorLayout, flatten_state, save_tensors
from raggedshard.checkpoint.index import INDEX_NAME
from raggedshard.checkpoint.plan import find_fault
from raggedshard.checkpoint.shard_file import read_header
from raggedshard.checkpoint.state import decode_value, encode_value
from raggedshard.geometry import Box
from raggedshard.placements import RaggedShard, Replicate


def tensor_layout(layout: Layout, key: str = "w", dtype: str = "F32") -> TensorLayout:
    world = tuple(range(len(ranks(layout.mesh_shape))))
    return TensorLayout(key, dtype, layout.shape, layout.mesh_shape, world, layout.placements)


def locals_of(layout: Layout, full: np.ndarray) -> list[np.ndarray]:
    return [np.array(layout.local_of(full, coordinate)) for coordinate in ranks(layout.mesh_shape)]


# ---- between layouts


@given(data=st.data())
@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_any_layout_loads_into_any_other(data, tmp_path_factory):
    source = data.draw(layouts())
    target = data.draw(layouts(like=source))
    path = tmp_path_factory.mktemp("checkpoint") / "saved"
    full = numbered(source.shape)
    outcomes = save(path, [(tensor_layout(source), locals_of(source, full))])
    assert outcomes == [None] * len(outcomes)
    arrays = [np.zeros_like(local) for local in locals_of(target, full)]
    outcomes = load(path, [(tensor_layout(target), arrays)])
    assert outcomes == [{}] * len(outcomes)
    for array, expected in zip(arrays, locals_of(target, full), strict=True):
        np.testing.assert_array_equal(array, expected)


@given(layout=layouts(), number=st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_every_element_is_written_once(layout, number):
    count = np.zeros(layout.shape, int)
    pieces = 0
    for rank in range(len(ranks(layout.mesh_shape))):
        for piece in tensor_layout(layout).written_by(rank, number):
            pieces += 1
            count[tuple(slice(o, o + s) for o, s in zip(piece.box.offsets, piece.box.sizes, strict=True))] += 1
    assert (count == 1).all()
    assert pieces >= 1  # the shape of a tensor without elements is stated too


def test_each_rank_writes_the_rows_that_it_holds(tmp_path):
    save(tmp_path / "c", [(row_layout(), row_parts((2, 2, 2, 1)))])
    for rank, rows in enumerate([[0, 1], [2, 3], [4, 5], [6]]):
        held = load_file(tmp_path / "c" / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors")
        np.testing.assert_array_equal(held["w"], numbered((7, 8))[rows])


def test_an_empty_shard_writes_no_file(tmp_path):
    save(tmp_path / "c", [(row_layout(rows=2, units=(1, 1, 0, 0)), row_parts((1, 1, 0, 0)))])
    names = sorted(p.name for p in (tmp_path / "c").glob("*.safetensors"))
    assert names == [f"shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2)]


def test_replicas_share_the_writing(tmp_path):
    placements = (Replicate(), RaggedShard((0,), (2, 1)))
    held = [
        (TensorLayout(key, "F32", (3, 2), (2, 2), (0, 1, 2, 3), placements), row_parts((2, 1), 2) * 2) for key in "ab"
    ]
    save(tmp_path / "c", held)
    keys = [sorted(load_file(tmp_path / "c" / f"shard-0000{n}-model-00001-of-00001.safetensors")) for n in (1, 2, 3, 4)]
    assert keys == [["a"], ["a"], ["b"], ["b"]]


def test_slices_of_a_larger_mesh_are_replicas_that_share_the_writing(tmp_path):
    """On (dp 2, tp 2), tensors on dp only: ranks 0 and 2 see the mesh (0, 2), ranks 1 and 3 see (1, 3)."""
    parts = [part for part in row_parts((2, 1), 2) for _ in range(2)]

    def one(ranks):
        placements = (RaggedShard((0,), (2, 1)),)
        own = (0, 2) if ranks.rank % 2 == 0 else (1, 3)
        layouts = [TensorLayout(key, "F32", (3, 2), (2,), own, placements) for key in "ab"]
        save_tensors(tmp_path / "c", layouts, {}, lambda *_: parts[ranks.rank].reshape(-1), ranks)

    assert on_ranks(4, one) == [None] * 4
    keys = [sorted(load_file(tmp_path / "c" / f"shard-0000{n}-model-00001-of-00001.safetensors")) for n in (1, 2, 3, 4)]
    assert keys == [["a"], ["b"], ["a"], ["b"]]


def test_the_index_names_every_chunk(tmp_path):
    save(tmp_path / "c", [(row_layout(), row_parts((2, 2, 2, 1)))], {"step": 3})
    index = json.loads((tmp_path / "c" / INDEX_NAME).read_text())
    own = index["metadata"]["raggedshard"]
    assert own["values"] == {"step": 3}
    assert own["tensors"]["w"]["shape"] == [7, 8]
    chunks = [(c["file"], c["offsets"], c["sizes"]) for c in own["tensors"]["w"]["chunks"]]
    assert chunks == [
        (f"shard-0000{n + 1}-model-00001-of-00001.safetensors", [2 * n, 0], [2 if n < 3 else 1, 8]) for n in range(4)
    ]
    assert index["weight_map"]["w"] == [file for file, _, _ in chunks]
    for file, size in own["files"].items():
        assert (tmp_path / "c" / file).stat().st_size == size


# ---- states


def test_leaves_are_named_by_their_path():
    state = {"m": {"w": "T1"}, "o": {"state": {0: {"s": "T2"}}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}, "n": []}
    flat = flatten_state(state, lambda leaf: isinstance(leaf, str))
    assert flat.tensors == {"m.w": "T1", "o.state.0.s": "T2"}
    assert flat.values == {"o.groups.0.lr": 0.1, "o.groups.0.betas": (0.9, 0.99), "n": []}
    flat.set_value("o.groups.0.lr", 0.2)
    assert state["o"]["groups"][0]["lr"] == 0.2


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"key 'a\.b' stands for two entries"):
        flatten_state({"a.b": 1, "a": {"b": 2}}, lambda leaf: False)


def test_a_tensor_in_a_tuple_is_refused():
    with pytest.raises(TypeError, match=r"key 'a\.b'"):
        flatten_state({"a": {"b": ("T", 1)}}, lambda leaf: leaf == "T")


@pytest.mark.parametrize(
    "value", [None, True, 3, 10**30, 0.1, float("inf"), -float("inf"), "x", [1, (2, [None])], (), [], {}, (0.9, 0.999)]
)
def test_values_survive_json(value):
    through = decode_value(json.loads(json.dumps(encode_value("k", value), allow_nan=False)))
    assert through == value
    assert type(through) is type(value)


def test_nan_survives_json():
    assert np.isnan(decode_value(json.loads(json.dumps(encode_value("k", float("nan")), allow_nan=False))))


@pytest.mark.parametrize("value", [object(), b"x", {1, 2}, [object()], lambda: 0])
def test_values_that_json_cannot_hold_name_their_key(value):
    with pytest.raises(TypeError, match="key 'k'"):
        encode_value("k", value)


# ---- faults


@pytest.mark.parametrize(
    ("boxes", "text", "chunk"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (2, 3))], None, None),
        ([((0, 0), (2, 3)), ((3, 0), (1, 3))], "gap", None),
        ([((0, 0), (2, 3)), ((1, 0), (3, 3))], "overlap", 1),
        ([((0, 0), (2, 3)), ((0, 0), (2, 3))], "overlap", 1),  # as many elements as the tensor has
        ([((0, 0), (4, 2)), ((0, 2), (4, 2))], "outside", 1),
        ([((0, 0), (4, 3)), ((0,), (0,))], "outside", 1),
        ([], "gap", None),
    ],
)
def test_gaps_and_overlaps_are_found(boxes, text, chunk):
    fault = find_fault((4, 3), [Box(*box) for box in boxes])
    if text is None:
        assert fault is None
    else:
        assert fault is not None
        assert text in fault.text
        assert fault.chunk == chunk


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_fault_is_found_exactly_when_some_element_is_not_held_once(data):
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    interval = [
        st.integers(0, size).flatmap(lambda o, n=size: st.tuples(st.just(o), st.integers(0, n - o))) for size in shape
    ]
    drawn = data.draw(st.lists(st.tuples(*interval), min_size=1, max_size=5))
    boxes = [Box((a[0], b[0]), (a[1], b[1])) for a, b in drawn]
    count = np.zeros(shape, int)
    for box in boxes:
        count[box.offsets[0] : box.offsets[0] + box.sizes[0], box.offsets[1] : box.offsets[1] + box.sizes[1]] += 1
    assert (find_fault(shape, boxes) is None) == bool((count == 1).all())


FIRST = "shard-00001-model-00001-of-00001.safetensors"
SECOND = "shard-00002-model-00001-of-00001.safetensors"


def edit_index(path: Path, edit) -> None:
    content = json.loads((path / INDEX_NAME).read_text())
    edit(content["metadata"]["raggedshard"])
    (path / INDEX_NAME).write_text(json.dumps(content))


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def shift_second_chunk(by: int):
    def edit(own):
        own["tensors"]["w"]["chunks"][1]["offsets"][0] += by

    return edit


FAULTS = {
    "no checkpoint": (lambda p: p.rename(p.with_name("away")), ["there is no checkpoint"]),
    "no index": (lambda p: (p / INDEX_NAME).unlink(), [INDEX_NAME, "missing"]),
    "half an index": (lambda p: cut(p / INDEX_NAME, 100), [INDEX_NAME, "damaged"]),
    "missing file": (lambda p: (p / SECOND).unlink(), [SECOND, "missing", "'w'"]),
    "truncated data": (lambda p: cut(p / SECOND, (p / SECOND).stat().st_size - 1), [SECOND, "truncated", "'w'"]),
    "truncated header": (lambda p: cut(p / SECOND, 20), [SECOND, "truncated", "'w'"]),
    "empty file": (lambda p: cut(p / SECOND, 0), [SECOND, "truncated", "'w'"]),
    "damaged header": (lambda p: (p / SECOND).write_bytes(b"\x10" + b"\0" * 200), [SECOND, "damaged", "'w'"]),
    "trailing bytes": (lambda p: (p / SECOND).write_bytes((p / SECOND).read_bytes() + b"x"), [SECOND, "bytes"]),
    "file of another rank": (lambda p: (p / SECOND).write_bytes((p / FIRST).read_bytes()), [SECOND, "'w'"]),
    "one file too many": (lambda p: (p / "x.safetensors").write_bytes(b""), ["x.safetensors", "no part"]),
    "gap": (lambda p: edit_index(p, lambda own: own["tensors"]["w"]["chunks"].pop(1)), [INDEX_NAME, "gap", "'w'"]),
    "overlap": (lambda p: edit_index(p, shift_second_chunk(-1)), [SECOND, "overlap", "'w'"]),
    "outside": (lambda p: edit_index(p, shift_second_chunk(6)), [SECOND, "outside", "'w'"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_checkpoint_is_refused_by_every_rank_and_nothing_is_touched(fault, tmp_path):
    path = tmp_path / "c"
    save(path, [(row_layout(), row_parts(UNITS))])
    damage, texts = FAULTS[fault]
    damage(path)
    arrays = [np.full_like(part, -1) for part in row_parts((4, 3))]
    errors = load(path, [(row_layout(units=(4, 3)), arrays)])
    for error in errors:
        assert isinstance(error, CheckpointError)
        for text in texts:
            assert text in str(error), str(error)
    assert all((array == -1).all() for array in arrays)


def test_a_state_that_differs_from_the_checkpoint_is_refused(tmp_path):
    path = tmp_path / "c"
    save(path, [(row_layout(), row_parts(UNITS)), (row_layout("b"), row_parts(UNITS))], {"step": 1, "lr": 0.5})
    arrays = [np.full_like(part, -1) for part in row_parts(UNITS)]
    both = [(row_layout(), arrays), (row_layout("b"), arrays)]
    cases = {
        "missing in the state: key 'b'": (both[:1], ["step", "lr"]),
        "missing in the checkpoint: key 'c'": ([*both, (row_layout("c"), arrays)], ["step", "lr"]),
        "missing in the state: key 'lr'": (both, ["step"]),
        "missing in the checkpoint: key 'epoch'": (both, ["step", "lr", "epoch"]),
        "key 'b' has shape (7, 8) in the checkpoint, (7, 4) in the state": (
            [both[0], (row_layout("b", columns=4), arrays)],
            ["step", "lr"],
        ),
        "key 'b' has dtype F32 in the checkpoint, I32 in the state": (
            [both[0], (TensorLayout("b", "I32", (7, 8)), arrays)],
            ["step", "lr"],
        ),
        "key 'b' is a tensor in the checkpoint, a value in the state": (both[:1], ["step", "lr", "b"]),
        "key 'lr' is a value in the checkpoint, a tensor in the state": ([*both, (row_layout("lr"), arrays)], ["step"]),
    }
    for text, (held, keys) in cases.items():
        for error in load(path, held, keys):
            assert isinstance(error, CheckpointError), text
            assert text in str(error), str(error)
            assert str(path / INDEX_NAME) in str(error)
    assert all((array == -1).all() for array in arrays)
    assert load(path, both, ["lr", "step"]) == [{"step": 1, "lr": 0.5}] * 4


def test_ranks_that_hold_different_states_do_not_save(tmp_path):
    def one(ranks):
        save_tensors(tmp_path / "c", [row_layout("w" if ranks.rank != 2 else "v")], {}, lambda *_: b"", ranks)

    for error in on_ranks(4, one):
        assert isinstance(error, CheckpointError)
        assert "rank 2 has TensorLayout(key='v'" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_fails_to_write_stops_all_and_leaves_the_checkpoint_before(tmp_path):
    path = tmp_path / "c"
    save(path, [(row_layout(), row_parts(UNITS))])
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    parts = [2 * part for part in row_parts(UNITS)]
    parts[1] = parts[1][:1]  # rank 1 holds fewer rows than its placement says
    errors = save(path, [(row_layout(), parts)])
    for error in errors:
        assert isinstance(error, CheckpointError)
        assert "key 'w'" in str(error)
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("what", ["file", "directory"])
def test_something_else_is_never_replaced(what, tmp_path):
    path = tmp_path / "c"
    if what == "file":
        path.write_text("mine")
    else:
        path.mkdir()
        (path / "notes.txt").write_text("mine")
    for error in save(path, [(row_layout(), row_parts(UNITS))]):
        assert isinstance(error, CheckpointError)
        assert str(path) in str(error)
    assert (path if what == "file" else path / "notes.txt").read_text() == "mine"


def test_the_header_of_any_safetensors_file_is_read(tmp_path):
    from safetensors.numpy import save_file

    save_file({"a": numbered((3, 2)), "b": np.zeros((), np.int64)}, tmp_path / "x.safetensors")
    stored = {s.chunk.key: s.chunk for s in read_header(tmp_path / "x.safetensors")}
    assert stored["a"] == ("a", "F32", None, Box((0, 0), (3, 2)))
    assert stored["b"] == ("b", "I64", None, Box((), ()))


def test_no_framework_is_imported():
    script = "import sys, raggedshard.checkpoint; print({'torch', 'mindspore'} & sys.modules.keys())"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "set()", ended.stderr
