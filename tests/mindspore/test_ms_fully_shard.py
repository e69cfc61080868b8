"""fully_shard on MindSpore trains like the unsharded cell (Level0 of the requirement's section 9)."""

from __future__ import annotations

import pytest

from harness import run_distributed, world_sizes
from ms_training import OddMLP, assert_no_even_claim, float_batches, mesh_of, shard_odd_mlp, train_beside, twin

STYLES = ("value_and_grad", "backward")


def train_odd_mlp(rank, world_size, optimizer, style, replicas):
    reference, model = twin(OddMLP)
    shard_odd_mlp(model, mesh=mesh_of(world_size, replicas))
    assert_no_even_claim(model, world_size // replicas)
    return train_beside(rank, world_size, model, reference, optimizer, float_batches(10), style)


@world_sizes(1, 2, 3, 4)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_fsdp_trains_like_the_unsharded_cell(world_size, optimizer, style):
    losses = run_distributed(train_odd_mlp, world_size, optimizer, style, 1, framework="mindspore", timeout=120)
    assert losses[0][-1] < losses[0][0]
