"""``checkpoint.save`` and ``load`` over processes: every rank raises, the model stays, a dead rank hangs nobody."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Shard

from harness import run_distributed, run_ranks
from raggedshard.platform.torch.dtensor import wrap_local
from raggedshard.torch import DTensor, checkpoint, init_device_mesh
from training import OddMLP, full, mesh_of, shard_odd_mlp


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return shard_odd_mlp(OddMLP(), mesh=mesh_of(dist.get_world_size()))


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(param).detach().clone() for name, param in model.named_parameters()}


def save_model(rank: int, world_size: int, path: Path, seed: int) -> None:
    checkpoint.save({"model": build(seed).state_dict(), "seed": seed}, path)


def seed_of_loaded(rank: int, world_size: int, path: Path) -> int:
    """Load and check that all values are those of one seed."""
    model = build(99)
    state: dict[str, Any] = {"model": model.state_dict(), "seed": None}
    checkpoint.load(state, path)
    expected = values(build(state["seed"]))
    assert all(torch.equal(value, expected[name]) for name, value in values(model).items())
    return state["seed"]


def refused(rank: int, world_size: int, path: Path, faults: list[tuple[str, dict[str, Any], list[str]]]) -> None:
    """Every fault raises on this rank with its texts, and changes nothing."""
    for name, changes, texts in faults:
        model = build(5)
        before = values(model)
        state = {**model.state_dict(), **changes.get("more", {})}
        for key in changes.get("less", []):
            del state[key]
        with pytest.raises(checkpoint.CheckpointError) as caught:
            checkpoint.load({"model": state, "seed": 0}, changes.get("path", path))
        for text in texts:
            assert text in str(caught.value), (name, str(caught.value))
        assert all(torch.equal(value, before[key]) for key, value in values(model).items()), name
        assert all(bool((tensor == 0).all()) for tensor in changes.get("more", {}).values())


def test_what_does_not_fit_is_refused_by_every_rank_and_the_model_stays(tmp_path):
    path = tmp_path / "c"
    run_distributed(save_model, 4, path, 1)
    last = "shard-00004-model-00001-of-00001.safetensors"  # of rank 3: rank 0 of the loading run does not read it
    damaged = {}
    for name, damage in {
        "missing": lambda p: p.unlink(),
        "truncated": lambda p: p.write_bytes(p.read_bytes()[:-1]),
        "other": lambda p: p.write_bytes((p.parent / last.replace("4", "3", 1)).read_bytes()),
    }.items():
        damaged[name] = tmp_path / name
        damaged[name].mkdir()
        for file in path.iterdir():
            (damaged[name] / file.name).write_bytes(file.read_bytes())
        damage(damaged[name] / last)
    faults = [
        ("missing file", {"path": damaged["missing"]}, [last, "missing", "model."]),
        ("truncated file", {"path": damaged["truncated"]}, [last, "truncated", "model."]),
        ("file of another rank", {"path": damaged["other"]}, [last, "model."]),
        ("no checkpoint", {"path": tmp_path / "none"}, ["none", "no checkpoint"]),
        ("a key too many in the state", {"more": {"x": torch.zeros(2)}}, ["model.x", "index.json"]),
        ("a key too few in the state", {"less": ["up.weight"]}, ["model.up.weight", "index.json"]),
        ("wrong shape", {"more": {"up.bias": torch.zeros(6)}}, ["model.up.bias", "(6,)", "(7,)", "index.json"]),
        ("wrong dtype", {"more": {"up.bias": torch.zeros(7).double()}}, ["model.up.bias", "F64", "F32", "index.json"]),
    ]
    run_distributed(refused, 3, path, faults)


def untouched_by_one_ranks_trouble(rank: int, world_size: int, path: Path) -> None:
    model = build(5)
    before = values(model)
    state: Any = {"model": model.state_dict(), "seed": 0}
    if rank == 1:
        state["seed"] = torch.zeros(2, dtype=torch.complex128)  # no safetensors dtype
    for call in (checkpoint.load, checkpoint.save):
        with pytest.raises(TypeError if rank == 1 else checkpoint.CheckpointError) as caught:
            call(state, path)
        assert "key 'seed'" in str(caught.value)
        assert rank == 1 or "rank 1 failed" in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in values(model).items())


def test_one_ranks_error_is_every_ranks_error(tmp_path):
    run_distributed(save_model, 2, tmp_path / "c", 1)
    run_distributed(untouched_by_one_ranks_trouble, 3, tmp_path / "c")
    assert run_distributed(seed_of_loaded, 2, tmp_path / "c") == [1, 1]


def unsavable(rank: int, world_size: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    terms = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    wrong = wrap_local(torch.ones(2, 1), mesh, (Shard(0),), (3, 1), (1, 1))  # 2 rows on either rank
    for key, leaf, error in [
        ("terms", terms, ValueError),
        ("wrong", wrong, ValueError if rank == 1 else checkpoint.CheckpointError),
        ("meta", torch.ones(2, device="meta"), ValueError),
        ("sparse", torch.eye(2).to_sparse(), TypeError),
        ("function", len, TypeError),
    ]:
        with pytest.raises(error, match=f"key 'a.{key}'"):
            checkpoint.save({"a": {key: leaf}}, path)


def test_what_cannot_be_saved_names_its_key(tmp_path):
    run_distributed(unsavable, 2, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def die_after(calls: int) -> None:
    """End the process at the file system call after ``calls``."""
    left = calls

    def dying(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(17)
            return function(*args, **kwargs)

        return call

    for name in ("rename", "fsync", "rmdir", "unlink"):
        setattr(os, name, dying(getattr(os, name)))


def dying_save(rank: int, world_size: int, path: Path, dying_rank: int, calls: int) -> str:
    state = {"model": build(2).state_dict(), "seed": 2}
    if rank == dying_rank:
        die_after(calls)
    try:
        checkpoint.save(state, path)
    except RuntimeError as error:
        return str(error)
    return ""


# rank, file system calls that it lives through, the checkpoint that is left. Rank 0: its file, the index, the
# directory, the rename of the old one, that of the new one, then the clean-up.
DEATHS = [(1, 0, 1), (0, 0, 1), (0, 1, 1), (0, 3, 1), (0, 4, 1), (0, 5, 2), (0, 7, 2)]


@pytest.mark.parametrize(("dying_rank", "calls", "seed"), DEATHS)
def test_a_rank_that_dies_in_save_ends_it_for_all_and_a_whole_checkpoint_is_left(tmp_path, dying_rank, calls, seed):
    path = tmp_path / "c"
    run_distributed(save_model, 3, path, 1)
    outcomes = run_ranks(dying_save, 3, path, dying_rank, calls, timeout=30)
    for outcome in outcomes:
        assert outcome.kind == ("died" if outcome.rank == dying_rank else "returned")
        assert outcome.rank == dying_rank or outcome.value
    assert run_distributed(seed_of_loaded, 2, path) == [seed, seed]
    run_distributed(save_model, 2, path, 3)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert run_distributed(seed_of_loaded, 3, path) == [3, 3, 3]


def dying_load(rank: int, world_size: int, path: Path) -> str:
    state = {"model": build(2).state_dict(), "seed": 2}
    if rank == 1:
        import raggedshard.checkpoint.loading as loading

        loading.__dict__["read_header"] = lambda path: os._exit(17)
    try:
        checkpoint.load(state, path)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_dies_in_load_ends_it_for_all(tmp_path):
    run_distributed(save_model, 3, tmp_path / "c", 1)
    outcomes = run_ranks(dying_load, 3, tmp_path / "c", timeout=30)
    assert [outcome.kind for outcome in outcomes] == ["returned", "died", "returned"]
    assert all(re.search("closed|reset|Connection", outcome.value) for outcome in (outcomes[0], outcomes[2]))
