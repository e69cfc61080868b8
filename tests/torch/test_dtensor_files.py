"""Copies, pickles and checkpoints of sharded tensors."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Partial, Replicate, Shard

from harness import run_distributed, world_sizes
from raggedshard.platform.torch.dtensor import ShardedDTensor, wrap_local
from raggedshard.platform.torch.placements import RaggedShard, RaggedStridedShard
from sharded import ROWS, assert_layout, assert_same, by_rows, even, grid, line, parameter, shard


def trip(tensor: Any, how: str) -> Any:
    if how == "deepcopy":
        return copy.deepcopy(tensor)
    if how == "pickle":
        return pickle.loads(pickle.dumps(tensor))
    buffer = io.BytesIO()
    torch.save({"w": tensor}, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=how == "weights_only")["w"]


def make_copies(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    for how in ("deepcopy", "pickle", "save", "weights_only"):
        for rows in (0, 1, 7):
            for make in (shard, even):
                x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))
                leaf: Any = parameter(make(x, mesh))
                leaf.note = "kept"
                leaf.grad = make(x * 2, mesh)
                again = trip(leaf, how)
                assert_layout(again, leaf, how)
                assert again.requires_grad and again.is_leaf
                assert again.note == "kept" and again.stride() == leaf.stride()
                assert_same(again, x, how)
                if how == "deepcopy":
                    assert_same(again.grad, x * 2)
                with torch.no_grad():
                    again.add_(1)
                assert_same(leaf, x, how)
                again.grad = None
                (again.t() * 3).sum().backward()
                assert_layout(again.grad, again, how)
                assert_same(again.grad, torch.full((rows, 3), 3.0), how)
                assert isinstance(again, torch.nn.Parameter), how
                frozen = trip(make(x, mesh), how)
                assert type(frozen) is ShardedDTensor and not isinstance(frozen, torch.nn.Parameter)
                assert not frozen.requires_grad


@world_sizes(1, 3)
def test_copies_are_equal_and_independent(world_size: int) -> None:
    run_distributed(make_copies, world_size)


def share(rank: int, world_size: int) -> None:
    """Padded storage: a deep copy of its owner keeps the views together; a file holds no padding."""
    mesh = line(world_size)
    storage = torch.full((1000,), 5.0)
    rows = (4, 3)[rank]
    leaf: Any = parameter(wrap_local(storage[: rows * 2].view(rows, 2), mesh, by_rows(7, mesh), (7, 2), (2, 1)))
    again, owner = copy.deepcopy((leaf, storage))
    owner[: rows * 2] = 1.0
    assert again._local_tensor.tolist() == [[1.0, 1.0]] * rows
    assert leaf._local_tensor.tolist() == [[5.0, 5.0]] * rows
    tied = torch.nn.ParameterList([leaf, leaf])
    copied = copy.deepcopy(tied)
    assert copied[0] is copied[1] and copied[0] is not leaf
    assert len(pickle.dumps(leaf)) < 4000
    with pytest.raises(RuntimeError, match="only leaf tensors"):
        copy.deepcopy(leaf * 2)


def test_padded_storage() -> None:
    run_distributed(share, 2)


def values() -> dict[str, torch.Tensor]:
    tensors = {f"rows{rows}": torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows)) for rows in ROWS}
    return {**tensors, "cells": torch.arange(96.0).view(12, 4, 2), "half": torch.arange(7.0).bfloat16()}


def layouts_on(world_size: int, strange: bool) -> dict[str, Any]:
    """A state of sharded zeros: by rows, or cells of two dims and units that leave ranks without rows."""
    mesh = line(world_size)
    state = {}
    for name, value in values().items():
        placements = by_rows(value.shape[0], mesh)
        if strange and name == "cells":
            placements = (RaggedShard((0, 1), (*range(1, world_size), 48 - sum(range(world_size)))),)
        elif strange and value.shape[0]:
            placements = (RaggedShard((0,), (*(0,) * (world_size - 1), 1)),)
        state[name] = shard(torch.zeros_like(value), mesh, placements)
    return state


def save(rank: int, world_size: int, path: str, strange: bool) -> None:
    state = layouts_on(world_size, strange)
    for name, value in values().items():
        state[name].copy_(shard(value, state[name].device_mesh, state[name].placements))
    dcp.save(state, checkpoint_id=path)


def load(rank: int, world_size: int, path: str, strange: bool) -> None:
    state = layouts_on(world_size, strange)
    dcp.load(state, checkpoint_id=path)
    for name, value in values().items():
        assert_same(state[name], value, name)


def load_others(rank: int, world_size: int, path: str) -> None:
    """Into plain tensors, torch's placements, replicas and strided blocks."""
    mesh = grid(1, world_size)
    state = {name: torch.zeros_like(value) for name, value in values().items()}
    state["rows7"] = even(state["rows7"], mesh)
    state["rows10"] = shard(state["rows10"], mesh, (Replicate(), Shard(1)))
    state["rows13"] = shard(state["rows13"], mesh, (Replicate(), Replicate()))
    dcp.load(state, checkpoint_id=path)
    for name, value in values().items():
        assert_same(state[name], value, name)


# The warnings are torch's own, about its own checkpoint code.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_checkpoints_load_on_any_number_of_ranks(tmp_path: Path) -> None:
    run_distributed(save, 4, str(tmp_path / "four"), False)
    run_distributed(load, 3, str(tmp_path / "four"), False)
    run_distributed(save, 3, str(tmp_path / "three"), True)
    run_distributed(load, 1, str(tmp_path / "three"), False)
    run_distributed(load, 4, str(tmp_path / "three"), True)
    run_distributed(load_others, 2, str(tmp_path / "three"))


def two_dims(rank: int, world_size: int, path: str) -> None:
    mesh = grid(2, 2)
    x = torch.arange(21.0).view(7, 3)
    saved = {
        "hsdp": shard(x, mesh),
        "strided": shard(x + 100, mesh, (RaggedStridedShard((0,), (2, 2, 2, 1), 2), Shard(0))),
        "columns": shard(x + 200, mesh, (RaggedShard((0,), (1, 6)), Shard(1))),
    }
    dcp.save(saved, checkpoint_id=path)
    names = ["columns", "hsdp", "strided"]  # each into the layout of the next
    state = {a: torch.zeros_like(saved[b]) for a, b in zip(names, [*names[1:], names[0]], strict=True)}
    dcp.load(state, checkpoint_id=path)
    for name, offset in (("hsdp", 0), ("strided", 100), ("columns", 200)):
        assert_same(state[name], x + offset, name)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_checkpoints_on_two_mesh_dims(tmp_path: Path) -> None:
    run_distributed(two_dims, 4, str(tmp_path))


def name_boxes(rank: int, world_size: int) -> tuple[list[Any], int]:
    mesh = line(world_size)
    a = shard(torch.arange(6.0).view(2, 3), mesh)
    terms = wrap_local(torch.ones(2), mesh, (Partial(),), (2,), (1,))
    with pytest.raises(ValueError, match="reduce it first"):
        terms.__create_chunk_list__()
    boxes = [(tuple(c.offsets), tuple(c.sizes)) for c in a.__create_chunk_list__()]
    items = a.__create_write_items__("w", a)
    for item in items:
        assert a.__get_tensor_shard__(item.index).tolist() == [[[0.0, 1.0, 2.0]], [[3.0, 4.0, 5.0]]][rank]
    return boxes, len(items)


def test_an_empty_shard_names_no_box() -> None:
    first, second = [((0, 0), (1, 3))], [((1, 0), (1, 3))]
    assert run_distributed(name_boxes, 3) == [(first, 1), (second, 1), ([], 0)]
