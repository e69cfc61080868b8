"""fully_shard trains like the unsharded model, whatever the sizes (Level0 of the requirement's section 9)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from harness import run_distributed, world_sizes
from raggedshard.torch import RaggedShard
from training import (
    OddMLP,
    assert_no_even_claim,
    dtensors,
    float_batches,
    mesh_of,
    shard_odd_mlp,
    train_beside,
)

DTYPES = (torch.float64, torch.float32)


def train_odd_mlp(rank, world_size, optimizer, dtype, replicas):
    torch.manual_seed(0)
    reference = OddMLP().to(dtype)
    model = shard_odd_mlp(copy.deepcopy(reference), mesh=mesh_of(world_size, replicas))
    assert_no_even_claim(model, world_size // replicas)
    return train_beside(rank, world_size, model, reference, optimizer, float_batches(10, dtype), dtype=dtype)


@world_sizes(1, 2, 3, 4)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fsdp_trains_like_the_unsharded_model(world_size, optimizer, dtype):
    losses = run_distributed(train_odd_mlp, world_size, optimizer, dtype, 1)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize(("world_size", "replicas"), [(4, 2), (2, 2), (3, 3), (4, 4)])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_hsdp_trains_like_the_unsharded_model(world_size, replicas, optimizer):
    run_distributed(train_odd_mlp, world_size, optimizer, torch.float64, replicas)


def placements_of_odd_mlp(rank, world_size, replicas):
    model = shard_odd_mlp(OddMLP(), mesh=mesh_of(world_size, replicas))
    return {name: (p.placements, tuple(p.shape), tuple(p.to_local().shape)) for name, p in dtensors(model).items()}


def test_placements_state_each_ranks_rows():
    ranks = run_distributed(placements_of_odd_mlp, 4, 1)
    assert [rank["up.weight"][2] for rank in ranks] == [(2, 8), (2, 8), (2, 8), (1, 8)]
    assert [rank["mid.weight"][2] for rank in ranks] == [(2, 7), (2, 7), (1, 7), (0, 7)]
    assert [rank["one.weight"][2] for rank in ranks] == [(1, 5), (0, 5), (0, 5), (0, 5)]
    for rank in ranks:
        assert rank["up.weight"][:2] == ((RaggedShard((0,), (2, 2, 2, 1)),), (7, 8))
        assert rank["up.bias"][:2] == ((RaggedShard((0,), (2, 2, 2, 1)),), (7,))
        assert rank["mid.weight"][0] == (RaggedShard((0,), (2, 2, 1, 0)),)
        assert rank["one.weight"][0] == (RaggedShard((0,), (1, 0, 0, 0)),)
        assert rank["even.weight"][0] == (Shard(0),)


def test_hsdp_puts_replicate_in_front():
    for rank in run_distributed(placements_of_odd_mlp, 4, 2):
        assert rank["up.weight"][0] == (Replicate(), RaggedShard((0,), (4, 3)))
        assert rank["even.weight"][0] == (Replicate(), Shard(0))
