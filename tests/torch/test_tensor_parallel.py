"""FSDP and HSDP over tensor parallelism: both may cut dim 0, and either may be uneven."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from harness import run_distributed
from raggedshard.torch import DeviceMesh, FSDPModule, RaggedShard, RaggedStridedShard, fully_shard, init_device_mesh
from training import dtensors, float_batches, train_beside

NAMES = {2: ("dp", "tp"), 3: ("replicate", "shard", "tp")}


class TwoLayers(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(8, hidden)
        self.down = nn.Linear(hidden, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def parallelize(model: TwoLayers, mesh: DeviceMesh) -> None:
    # Between the two the activation stays a DTensor: from a local tensor torch could not tell 7 columns from 8.
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)


def sharded_two_layers(reference: TwoLayers, mesh_shape: tuple[int, ...], **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=NAMES[len(mesh_shape)])
    model = copy.deepcopy(reference)
    parallelize(model, mesh["tp"])
    dp_mesh = mesh["dp"] if len(mesh_shape) == 2 else mesh["replicate", "shard"]
    fully_shard(model.up, mesh=dp_mesh, **options)
    return fully_shard(model, mesh=dp_mesh, **options)


def train_two_layers(rank, world_size, hidden, mesh_shape, optimizer, dtype=torch.float64, **options):
    torch.manual_seed(0)
    reference = TwoLayers(hidden).to(dtype)
    model = sharded_two_layers(reference, mesh_shape, **options)
    tp = mesh_shape[-1]
    ranks, part = world_size // tp, rank // tp
    batches = float_batches(10, dtype)
    train_beside(rank, world_size, model, reference, optimizer, batches, dtype=dtype, ranks=ranks, part=part)


@pytest.mark.parametrize("mesh_shape", [(2, 2), (1, 2), (2, 1), (3, 1), (1, 3), (3, 2), (2, 3), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("hidden", [7, 8])
def test_trains_like_the_unsharded_model(mesh_shape, hidden):
    world_size = torch.Size(mesh_shape).numel()
    run_distributed(train_two_layers, world_size, hidden, mesh_shape, "adamw", timeout=120)


@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 2, 2)], ids=str)
def test_trains_like_the_unsharded_model_in_float32(mesh_shape):
    run_distributed(train_two_layers, torch.Size(mesh_shape).numel(), 7, mesh_shape, "sgd", torch.float32, timeout=120)


def test_resharding_to_smaller_groups_keeps_to_the_own_tensor_parallel_rank():
    run_distributed(train_two_layers, 8, 7, (4, 2), "sgd", reshard_after_forward=2, timeout=120)


def placements_of_two_layers(rank, world_size, hidden, mesh_shape):
    model = sharded_two_layers(TwoLayers(hidden), mesh_shape)
    return {name: (p.placements, tuple(p.to_local().shape)) for name, p in dtensors(model).items()}


def test_blocks_of_unlike_length_take_units_per_block():
    ranks = run_distributed(placements_of_two_layers, 4, 7, (2, 2))
    # blocks of 4 and 3 rows, each cut in two; mesh coordinates (dp, tp) in rank order
    assert [rank["up.weight"][1] for rank in ranks] == [(2, 8), (2, 8), (2, 8), (1, 8)]
    for rank in ranks:
        assert rank["up.weight"][0] == (RaggedStridedShard((0,), (2, 2, 2, 1), 2), Shard(0))
        assert rank["down.weight"][0] == (RaggedShard((0,), (3, 2)), Shard(1))
        assert rank["down.bias"][0] == (RaggedShard((0,), (3, 2)), Replicate())


def test_blocks_cut_alike_share_their_units():
    ranks = run_distributed(placements_of_two_layers, 4, 6, (2, 2))
    for rank in ranks:
        assert rank["up.weight"][0] == (RaggedStridedShard((0,), (2, 1), 2), Shard(0))


def test_even_blocks_keep_strided_shard():
    ranks = run_distributed(placements_of_two_layers, 4, 8, (2, 2))
    for rank in ranks:
        assert rank["up.weight"][0] == (_StridedShard(0, split_factor=2), Shard(0))


def test_hsdp_puts_replicate_in_front_of_both():
    ranks = run_distributed(placements_of_two_layers, 8, 7, (2, 2, 2), timeout=120)
    for rank in ranks:
        assert rank["up.weight"][0] == (Replicate(), RaggedStridedShard((0,), (2, 2, 2, 1), 2), Shard(0))


def unsharded_is_the_tp_dtensor(rank, world_size):
    model = sharded_two_layers(TwoLayers(7), (2, 2))
    up = cast(FSDPModule, model.up)
    up.unshard()
    weight = up.weight
    assert isinstance(weight, DTensor)
    assert weight.placements == (Shard(0),)
    assert weight.device_mesh.mesh_dim_names == ("tp",)
    assert weight.to_local().shape == ((4, 8) if rank % 2 == 0 else (3, 8))


def test_forward_sees_the_tp_dtensor():
    run_distributed(unsharded_is_the_tp_dtensor, 4)
