"""FSDP x TP checkpoints of every row count load exactly: into the same layout, other meshes, plain tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from checkpoint_models import assert_expected, build, clear, fill
from harness import run_distributed
from raggedshard.platform.torch.distribute import distribute_tensor
from raggedshard.torch import RaggedShard, checkpoint, init_device_mesh

MESHES = ((2, 2), (3, 2), (2, 3))
TARGETS = (*MESHES, (3,), (1,), ())


def save_all(rank: int, world_size: int, path: Path, mesh_shape: tuple[int, ...]) -> None:
    """Save in each format and load each into the layout that it came from."""
    model = build(mesh_shape)
    fill(model)
    assert_expected(model, "full_tensor")
    state = model.state_dict()
    dcp.save(state, checkpoint_id=path / "dcp")
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(path / "hf"), save_distributed=True))
    checkpoint.save(state, path / "own")
    load_all(rank, world_size, [path], mesh_shape)


def load_all(rank: int, world_size: int, paths: list[Path], mesh_shape: tuple[int, ...]) -> None:
    model = build(mesh_shape)
    loads = {
        "dcp": lambda state, path: dcp.load(state, checkpoint_id=path),
        "hf": checkpoint.load,  # torch's writer, our reader
        "own": checkpoint.load,
        "own by torch": lambda state, path: dcp.load(
            state, storage_reader=HuggingFaceStorageReader(str(path.with_name("own")))
        ),
    }
    for path in paths:
        for name, load in loads.items():
            clear(model)
            load(model.state_dict(), path / name)
            assert_expected(model, f"{path.name} {name} into {mesh_shape}")
    dist.barrier()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> list[Path]:
    """One directory for each mesh, with a checkpoint in each format."""
    root = tmp_path_factory.mktemp("layouts")
    paths = [root / "x".join(map(str, mesh_shape)) for mesh_shape in MESHES]
    for path, mesh_shape in zip(paths, MESHES, strict=True):
        path.mkdir()
        run_distributed(save_all, mesh_shape[0] * mesh_shape[1], path, mesh_shape, timeout=120)
    return paths


@pytest.mark.parametrize("target", TARGETS, ids=lambda shape: "x".join(map(str, shape)) or "plain")
def test_every_value_is_exact_in_every_layout(saved, target):
    world_size = 1
    for size in target:
        world_size *= size
    run_distributed(load_all, world_size, saved, target, timeout=120)


def several_boxes(rank: int, world_size: int, path: Path) -> None:
    """12, 20, 0 and 24 cells of (7, 8): rank 0 holds a row and a half, which is two boxes."""
    values = torch.arange(56.0).view(7, 8)
    tensor = distribute_tensor(values, init_device_mesh("cpu", (4,)), [RaggedShard((0, 1), (3, 5, 0, 6))])
    writer = HuggingFaceStorageWriter(str(path / "hf"), save_distributed=True)
    with pytest.raises(dcp.CheckpointException, match="key 'w': this rank holds 2 boxes"):
        dcp.save({"w": tensor}, storage_writer=writer)
    checkpoint.save({"w": tensor}, path / "own")
    reader = HuggingFaceStorageReader(str(path / "own"))
    for load in (lambda s: checkpoint.load(s, path / "own"), lambda s: dcp.load(s, storage_reader=reader)):
        plain = torch.full((7, 8), -1.0)
        load({"w": plain})
        assert torch.equal(plain, values)
        tensor.fill_(-1)
        load({"w": tensor})
        assert torch.equal(tensor.full_tensor(), values)
    dist.barrier()


def test_several_boxes_of_a_rank_are_saved_or_refused_but_never_dropped(tmp_path):
    run_distributed(several_boxes, 4, tmp_path)
    assert len(list((tmp_path / "own").glob("shard-00001-*.safetensors"))) == 2
