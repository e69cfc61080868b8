"""Training that stops, is saved and goes on with more or fewer ranks equals training that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from harness import run_distributed
from raggedshard.torch import checkpoint
from training import OddMLP, float_batches, full, mesh_of, own_part, shard_odd_mlp, square_loss

STEPS = 10
Result = dict[str, Any]


def start(world_size: int, seed: int, replicas: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = shard_odd_mlp(OddMLP().to(torch.float64), mesh=mesh_of(world_size, replicas))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1), betas=(0.8, 0.9))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor], rank: int, world: int
) -> Result:
    """Train on global batches; returns losses, parameters and optimizer state as plain tensors."""
    losses = []
    for batch in batches:
        loss = square_loss(model, own_part(batch, rank, world))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean / world)
    states = optimizer.state_dict()["state"].items()
    return {
        "losses": torch.stack(losses),
        **{name: full(param).detach() for name, param in model.named_parameters()},
        **{f"{i}.{key}": full(value) for i, state in states for key, value in state.items()},
    }


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Result:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def save_at_half(rank: int, world_size: int, path: Path, replicas: int = 1) -> Result:
    """Train, save in both formats, train on; returns the second half."""
    batches = list(float_batches(2 * STEPS, torch.float64))
    model, optimizer = start(world_size, 0, replicas)
    train(model, optimizer, batches[:STEPS], rank, world_size)
    state = state_of(model, optimizer, STEPS)
    checkpoint.save(state, path / "own")
    dcp.save(state, checkpoint_id=path / "dcp")
    return train(model, optimizer, batches[STEPS:], rank, world_size)


def resume(rank: int, world_size: int, path: Path, kind: str, replicas: int = 1) -> Result:
    """Load into a model and an optimizer that trained from other values, and train the second half."""
    batches = list(float_batches(2 * STEPS, torch.float64))
    model, optimizer = start(world_size, 1, replicas)
    train(model, optimizer, batches[:2], rank, world_size)  # nothing gathered before the load may be used after it
    state = state_of(model, optimizer, 0)
    if kind == "own":
        checkpoint.load(state, path / "own")
    else:
        dcp.load(state, checkpoint_id=path / "dcp")
    assert state["step"] == STEPS
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 0.01
    return train(model, optimizer, batches[STEPS:], rank, world_size)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[int, tuple[Path, Result]]:
    """By the number of ranks: where they saved, and how their own second half went."""
    found = {}
    for ranks in (1, 2, 3, 4):
        path = tmp_path_factory.mktemp(f"from{ranks}")
        found[ranks] = (path, run_distributed(save_at_half, ranks, path)[0])
    return found


@pytest.mark.parametrize("kind", ["own", "dcp"])
@pytest.mark.parametrize(("before", "after"), [(4, 4), (4, 3), (4, 2), (4, 1), (3, 4), (2, 4), (1, 4), (2, 3)])
def test_the_next_steps_equal_those_of_the_run_that_never_stopped(saved, before, after, kind):
    path, expected = saved[before]
    for actual in run_distributed(resume, after, path, kind):
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            # the same arithmetic in another order of ranks: design.md's bound for float64
            torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    if before == after:
        assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.parametrize("kind", ["own", "dcp"])
def test_replicas_stop_and_go_on_too(saved, tmp_path, kind):
    path, expected = saved[4]
    run_distributed(save_at_half, 4, tmp_path, 2)
    for outcomes in (
        run_distributed(resume, 4, path, kind, 2),  # four shards to two replicas of two
        run_distributed(resume, 3, tmp_path, kind),  # and from those to three shards
    ):
        for actual in outcomes:
            for name, value in expected.items():
                torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_the_steps_after_the_checkpoint_change_the_model(saved):
    losses = saved[4][1]["losses"]
    assert losses[-1] < 0.9 * losses[0]
