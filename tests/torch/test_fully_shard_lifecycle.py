"""Inference, containers, errors, units by hand and communication: training beside them stays like the unsharded."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from harness import run_distributed
from raggedshard.torch import DeviceMesh, fully_shard
from training import (
    Pair,
    all_sharded,
    mesh_of,
    odd_mlp_pair,
    on_own_rows,
    pair_of,
    rows_of,
    square_loss,
)

# ---- inference


def infer_between_steps(rank, world_size, mode, reshard):
    pair = odd_mlp_pair(rank, world_size, reshard_after_forward=reshard)
    with mode():
        pair.sharded(rows_of(rank))
    for _ in range(2):
        loss = on_own_rows(pair.sharded, rank)
        with mode():  # while a forward waits for its backward
            out = pair.sharded(rows_of(rank))
            expected = pair.reference(rows_of(rank))
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        if reshard is not False:
            assert all_sharded(pair.sharded)
        loss.backward()
        pair.sharded.zero_grad()
        with mode():
            pair.sharded(rows_of(rank))
        pair.train(on_own_rows, steps=1)
        assert all_sharded(pair.sharded)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("reshard", [None, True, False, 2])
def test_inference_first_thing_and_between_steps(mode, reshard):
    run_distributed(infer_between_steps, 4, mode, reshard)


# ---- inputs and outputs


@dataclass
class Output:
    hidden: torch.Tensor
    logits: torch.Tensor | None = None
    name: str = "output"


class Structured(nn.Module):
    """Takes and returns nested containers; ``shape`` chooses which."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 7)
        self.head = nn.Linear(7, 3)
        self.shape = shape

    def forward(self, inputs: Any, *, scale: torch.Tensor) -> Any:
        x = inputs["x"][0] if isinstance(inputs, dict) else inputs.hidden
        hidden = torch.tanh(self.linear(x)) * scale
        logits = self.head(hidden)
        if self.shape == "dict":
            return {"hidden": [hidden], "logits": (logits, None, 3)}
        return Output(hidden, logits) if self.shape == "dataclass" else (hidden, [logits, "text"])


class Caller(nn.Module):
    def __init__(self, shape: str) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.inner = Structured(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        inputs = Output(x) if self.inner.shape == "dataclass" else {"x": [x]}
        out = self.inner(inputs, scale=x.mean())
        if self.inner.shape == "dict":
            return out["hidden"][0].sum(1) + out["logits"][0].sum(1)
        if self.inner.shape == "dataclass":
            return out.hidden.sum(1) + out.logits.sum(1)
        return out[0].sum(1) + out[1][0].sum(1)


def structured(rank, world_size, shape):
    pair = pair_of(rank, world_size, lambda: Caller(shape), ("first", "inner"))
    pair.train(on_own_rows, steps=3)


@pytest.mark.parametrize("shape", ["dict", "dataclass", "tuple"])
def test_inputs_and_outputs_in_containers(shape):
    run_distributed(structured, 3, shape)


# ---- errors, submodules, units by hand


class Fails(nn.Module):
    """Raises in forward or in backward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 7)
        self.down = nn.Linear(7, 3)
        self.when = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.up(x))
        if self.when == "backward":
            x.register_hook(self._fail)
        x = self.down(x)
        if self.when == "forward":
            self._fail(x)
        return x

    def _fail(self, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("told to fail")


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.inner = Fails()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.tanh(self.first(x)))


def go_on_after_error(rank, world_size, when, again):
    pair = pair_of(rank, world_size, Outer, ("first", "inner.up", "inner"))
    for steps in (0, 2):  # as the very first thing, and later
        pair.train(on_own_rows, steps=steps)
        pair.backward(on_own_rows)
        pair.sharded.inner.when = when
        with pytest.raises(ArithmeticError, match="told to fail"):
            on_own_rows(pair.sharded, rank).backward()
        pair.sharded.inner.when = ""
        if when == "forward":
            pair.step()
        for optimizer in pair.optimizers:
            optimizer.zero_grad()
        if again == "inner":  # not through the root
            pair.backward(lambda m, r: square_loss(m.inner, rows_of(r)))
            pair.step()
        pair.train(on_own_rows)
        assert all_sharded(pair.sharded)


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("again", ["root", "inner"])
def test_training_goes_on_right_after_an_error(when, again):
    run_distributed(go_on_after_error, 3, when, again)


def other_backward_after_error(rank, world_size):
    """Of two forwards, the first one's backward raises; the second one's needs no new forward to be right."""
    pair = pair_of(rank, world_size, Outer, ("first", "inner"))
    pair.train(on_own_rows, steps=1)
    pair.sharded.inner.when = "backward"
    failing = on_own_rows(pair.sharded, rank)
    pair.sharded.inner.when = ""
    loss = square_loss(pair.sharded, rows_of(rank, seed=1))
    with pytest.raises(ArithmeticError, match="told to fail"):
        failing.backward()
    pair.sharded.zero_grad()
    loss.backward()
    for r in range(world_size):
        (square_loss(pair.reference, rows_of(r, seed=1)) / world_size).backward()
    pair.step()
    pair.train(on_own_rows)


def test_another_backward_is_right_after_one_that_raised():
    run_distributed(other_backward_after_error, 3)


def submodule_alone(rank, world_size, first):
    """A unit without its root: before the root's first forward, after it, and in one backward with it."""
    pair = odd_mlp_pair(rank, world_size)

    def alone(m: nn.Module, r: int) -> torch.Tensor:
        return square_loss(m.get_submodule("up"), rows_of(r))

    if first == "root":
        pair.train(on_own_rows, steps=1)
    pair.train(alone)
    pair.train(on_own_rows)
    pair.train(lambda m, r: on_own_rows(m, r) + alone(m, r))
    pair.train(lambda m, r: alone(m, r) + on_own_rows(m, r))


@pytest.mark.parametrize("first", ["root", "submodule"])
def test_a_unit_may_run_without_its_root(first):
    run_distributed(submodule_alone, 3, first)


def two_roots(rank, world_size):
    torch.manual_seed(0)
    reference = nn.ModuleList([nn.Linear(8, 7), nn.Linear(7, 5)]).double()
    model = copy.deepcopy(reference)
    for part in model:
        fully_shard(part, mesh=mesh_of(world_size))
    pair = Pair(rank, world_size, model, reference)
    pair.train(lambda m, r: m[1](torch.tanh(m[0](rows_of(r)))).square().mean())


def test_models_sharded_apart_train_in_one_backward():
    run_distributed(two_roots, 3)


def units_by_hand(rank, world_size, async_op):
    pair = odd_mlp_pair(rank, world_size)
    for _ in range(2):
        handle = pair.sharded.up.unshard(async_op=async_op)
        if async_op:
            handle.wait()
        else:
            assert handle is None
        weight = pair.sharded.up.weight
        assert not isinstance(weight, DTensor)
        torch.testing.assert_close(weight, pair.reference.get_parameter("up.weight"), rtol=0, atol=1e-12)
        assert isinstance(pair.sharded.even.weight, DTensor)
        pair.sharded.up.reshard()
        assert all_sharded(pair.sharded.up)
        pair.sharded.up.unshard(async_op=async_op)  # and not waited for
        pair.train(on_own_rows, steps=1)
        pair.sharded.up.unshard(async_op=async_op)
        pair.train(on_own_rows, steps=1)
    pair.sharded.up.unshard(async_op=True)
    pair.sharded.up.reshard()
    assert all_sharded(pair.sharded)
    pair.train(on_own_rows)


@pytest.mark.parametrize("async_op", [False, True])
def test_unshard_and_reshard_by_hand(async_op):
    run_distributed(units_by_hand, 3, async_op)


def stale_after_hand(rank, world_size):
    """Unsharded by hand, then stepped: the next forward gathers the new values."""
    pair = odd_mlp_pair(rank, world_size)
    pair.backward(on_own_rows)
    pair.sharded.up.unshard()
    for optimizer in pair.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    pair.train(on_own_rows)


def test_a_step_makes_what_was_unsharded_by_hand_stale():
    run_distributed(stale_after_hand, 3)


# ---- communication


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(7, 7) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def count_collectives(rank, world_size, replicas, reshard):
    """Calls of the collectives of torch.distributed in a step that is not the first."""
    torch.manual_seed(0)
    model: Any = Chain()
    mesh: DeviceMesh = mesh_of(world_size, replicas)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    x = torch.randn(2, 7)
    model(x).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        model(x).sum().backward()
    events = [event.name for event in profile.events() or ()]
    return {
        kind: sum(event.startswith(f"gloo:{kind}") for event in events)
        for kind in ("all_gather", "all_to_all", "all_reduce", "reduce_scatter", "broadcast")
    }


@pytest.mark.parametrize(("reshard", "gathers"), [(True, 6), (False, 3)])
def test_collectives_of_a_step(reshard, gathers):
    for counts in run_distributed(count_collectives, 2, 1, reshard):
        assert counts == {"all_gather": gathers, "all_to_all": 3, "all_reduce": 0, "reduce_scatter": 0, "broadcast": 0}


def test_hsdp_adds_one_all_reduce_a_unit():
    for counts in run_distributed(count_collectives, 4, 2, True):
        assert counts == {"all_gather": 6, "all_to_all": 3, "all_reduce": 3, "reduce_scatter": 0, "broadcast": 0}
