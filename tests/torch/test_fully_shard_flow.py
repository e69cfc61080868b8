"""Any order of forwards, backwards and steps gives what it gives on the unsharded model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from harness import run_distributed, world_sizes
from raggedshard.torch import fully_shard
from training import (
    Pair,
    all_sharded,
    full,
    mesh_of,
    odd_mlp_pair,
    on_own_rows,
    pair_of,
    rows_of,
    square_loss,
)

# ---- uses of a module


class Twice(nn.Module):
    """``square`` runs three times in a forward, ``odd`` twice, on parallel branches and in a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(7, 7)
        self.odd = nn.Linear(8, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.odd(x), self.odd(torch.tanh(x))
        return self.square(torch.tanh(self.square(a) + self.square(b)))


class Choosy(nn.Module):
    """Uses ``spare``, ``maybe`` and the ``scale`` parameter only when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 7)
        self.maybe = nn.Linear(7, 7)
        self.spare = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor, maybe: bool = False, scale: bool = False) -> torch.Tensor:
        x = torch.tanh(self.up(x))
        if maybe:
            x = self.maybe(x)
        return x * self.scale if scale else x


class Recursive(nn.Module):
    """Calls itself, and uses its weights again afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(8, 8)
        self.outward = nn.Linear(8, 7)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        if depth:
            x = x + self(torch.tanh(self.inward(x)), depth - 1).sum(1, keepdim=True)
        return self.outward(x)


class InPlace(nn.Module):
    """Writes to the outputs of its units."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 7)
        self.second = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x += 1
        x.tanh_()
        x = self.second(x)
        return x.mul_(2).sigmoid_()


class Bootstrap(nn.Module):
    """Uses ``value`` with and without gradients in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 7)
        self.value = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        value = self.value(hidden)
        with torch.no_grad():
            target = self.value(torch.tanh(self.body(x.flip(0))))
        return value - target + self.value(hidden * 2)


@pytest.mark.parametrize(
    ("build", "units"),
    [
        (Recursive, ()),
        (Recursive, ("inward",)),
        (InPlace, ("first", "second")),
        (Bootstrap, ("body", "value")),
    ],
)
@pytest.mark.parametrize("reshard", [True, False, 2])
def test_forwards_of_all_kinds(build, units, reshard):
    run_distributed(train_kind, 4, build, units, reshard)


def train_kind(rank, world_size, build, units, reshard):
    pair_of(rank, world_size, build, units, reshard_after_forward=reshard).train(on_own_rows, steps=3)


def use_several_times(rank, world_size, reshard):
    pair = pair_of(rank, world_size, Twice, ("square", "odd"), reshard_after_forward=reshard)
    pair.train(on_own_rows, steps=3)


@world_sizes(1, 3)
@pytest.mark.parametrize("reshard", [True, False])
def test_a_module_may_run_several_times_in_one_forward(world_size, reshard):
    run_distributed(use_several_times, world_size, reshard)


def leave_unused(rank, world_size):
    pair = pair_of(rank, world_size, Choosy, ("maybe", "spare"))
    before = {name: full(p).clone() for name, p in pair.sharded.named_parameters()}
    pair.train(on_own_rows)
    names = ("maybe.weight", "maybe.bias", "spare.weight", "spare.bias", "scale")
    pair.backward(on_own_rows)
    grads = {name: p.grad for name, p in pair.sharded.named_parameters()}
    assert all(grads[name] is None for name in names)
    pair.step()
    now = {name: full(p) for name, p in pair.sharded.named_parameters()}
    assert all(torch.equal(now[name], before[name]) for name in names)
    assert not torch.equal(now["up.weight"], before["up.weight"])


def test_what_nobody_uses_has_no_gradient_and_no_weight_decay():
    run_distributed(leave_unused, 3)


def use_then_leave(rank, world_size):
    pair = pair_of(rank, world_size, Choosy, ("maybe",))
    for step in range(4):
        pair.backward(lambda m, r, on=step % 2 == 0: m(rows_of(r), maybe=on, scale=not on).square().mean())
        pair.step()


def test_what_is_used_in_every_other_step_keeps_up():
    run_distributed(use_then_leave, 3)


def use_on_some_ranks(rank, world_size, units):
    pair = pair_of(rank, world_size, Choosy, units)
    pair.train(lambda m, r: m(rows_of(r), scale=r == 1).square().mean())
    pair.train(lambda m, r: m(rows_of(r), maybe=True, scale=r != 1).square().mean())


@pytest.mark.parametrize("units", [(), ("maybe",)])
def test_a_parameter_that_some_ranks_do_not_use_has_zero_gradient_there(units):
    run_distributed(use_on_some_ranks, 4, units)


# ---- forwards and backwards in other orders


def two_forwards_one_backward(rank, world_size):
    pair = odd_mlp_pair(rank, world_size)
    pair.train(lambda m, r: square_loss(m, rows_of(r)) + square_loss(m, rows_of(r, rows=3, seed=1)))


def two_forwards_two_backwards(rank, world_size):
    pair = odd_mlp_pair(rank, world_size)
    for model, ranks in ((pair.reference, range(world_size)), (pair.sharded, [rank])):
        for r in ranks:
            losses = [square_loss(model, rows_of(r, seed=seed)) for seed in range(3)]
            for loss in (losses[1], losses[0], losses[2]):
                (loss / len(ranks)).backward()
    pair.step()
    pair.train(on_own_rows)


def backward_twice(rank, world_size):
    """The second backward meets the uses of the first again, the third a new one besides."""
    for build, units in ((Twice, ("square", "odd")), (Recursive, ())):
        pair = pair_of(rank, world_size, build, units)
        for model, ranks in ((pair.reference, range(world_size)), (pair.sharded, [rank])):
            for r in ranks:
                x, y = (rows_of(r, seed=seed).requires_grad_() for seed in range(2))
                loss = square_loss(model, x) / len(ranks)
                loss.backward(retain_graph=True)
                loss.backward(retain_graph=True)
                (loss + square_loss(model, y) / len(ranks)).backward()
        pair.step()
        pair.train(on_own_rows)


def keep_order_between_backwards(rank, world_size):
    pair = pair_of(rank, world_size, Twice, ("square", "odd"))
    for model, ranks in ((pair.reference, range(world_size)), (pair.sharded, [rank])):
        for r in ranks:
            first, second = (square_loss(model, rows_of(r, seed=seed)) / len(ranks) for seed in range(2))
            if model is pair.sharded:
                pair.sharded.set_is_last_backward(False)
            first.backward(retain_graph=True)
            if model is pair.sharded:
                pair.sharded.set_is_last_backward(True)
            (first + second).backward()
    pair.step()
    pair.train(on_own_rows)


def interleave_steps(rank, world_size):
    """A step between two forwards, with no backward of the first: the second must see the new values."""
    for reshard in (None, True, False, 2):
        pair = odd_mlp_pair(rank, world_size, reshard_after_forward=reshard)
        pair.backward(on_own_rows)
        pair.check_gradients()
        on_own_rows(pair.sharded, rank)
        for optimizer in pair.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        pair.train(on_own_rows)


@pytest.mark.parametrize(
    "flow",
    [
        two_forwards_one_backward,
        two_forwards_two_backwards,
        backward_twice,
        keep_order_between_backwards,
        interleave_steps,
    ],
)
def test_order_of_forwards_and_backwards(flow):
    run_distributed(flow, 4)


def input_needs_grad(rank, world_size):
    pair = odd_mlp_pair(rank, world_size)
    for _ in range(2):
        grads = []
        for model in (pair.reference, pair.sharded):
            x = rows_of(rank).requires_grad_()
            loss = square_loss(model, x)
            grads.append(torch.autograd.grad(loss, x)[0])
        torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=1e-12)
        assert all(p.grad is None for p in pair.sharded.parameters())
        assert all_sharded(pair.sharded)
        pair.train(on_own_rows, steps=1)


def test_gradients_of_inputs_alone_leave_no_gradients_behind():
    run_distributed(input_needs_grad, 3)


# ---- accumulation


def accumulate_without_sync(rank, world_size, replicas, reshard):
    """Two micro-batches without communication and one with."""
    pair = odd_mlp_pair(rank, world_size, replicas)
    for _ in range(2):
        pair.sharded.set_reshard_after_backward(reshard)
        pair.sharded.set_requires_gradient_sync(False)
        for seed in range(2):
            pair.backward(lambda m, r, seed=seed: square_loss(m, rows_of(r, seed=seed)))
        pair.sharded.reshard()
        assert all(p.grad is None for unit in pair.sharded.modules() for p in unit.parameters(recurse=False))
        pair.sharded.set_reshard_after_backward(True)
        pair.sharded.set_requires_gradient_sync(True)
        pair.backward(lambda m, r: square_loss(m, rows_of(r, seed=2)))
        pair.step()


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("reshard", [True, False])
def test_accumulation_without_gradient_sync(replicas, reshard):
    run_distributed(accumulate_without_sync, 4, replicas, reshard)


def accumulate_unused_last(rank, world_size, replicas):
    """What only the first micro-batch used is reduced with the last one, which did not run it."""
    torch.manual_seed(0)
    reference = Choosy().double()
    model = copy.deepcopy(reference)
    mesh = mesh_of(world_size, replicas)
    fully_shard(model.maybe, mesh=mesh)
    pair = Pair(rank, world_size, fully_shard(model, mesh=mesh), reference)
    switch = pair.sharded.set_requires_gradient_sync if replicas == 1 else pair.sharded.set_requires_all_reduce
    for _ in range(2):
        switch(False)
        pair.backward(lambda m, r: m(rows_of(r), maybe=True, scale=True).square().mean())
        switch(True)
        pair.backward(lambda m, r: m(rows_of(r, seed=1)).square().mean())
        pair.step()


@pytest.mark.parametrize("replicas", [1, 2])
def test_accumulation_ends_right_where_the_last_micro_batch_uses_less(replicas):
    run_distributed(accumulate_unused_last, 4, replicas)


def accumulate_without_all_reduce(rank, world_size):
    pair = odd_mlp_pair(rank, world_size, replicas=2)
    for _ in range(2):
        pair.sharded.set_requires_all_reduce(False)
        for seed in range(2):
            pair.backward(lambda m, r, seed=seed: square_loss(m, rows_of(r, seed=seed)))
        assert all(p.grad is None for p in pair.sharded.parameters())
        pair.sharded.set_requires_all_reduce(True)
        pair.backward(lambda m, r: square_loss(m, rows_of(r, seed=2)))
        pair.step()


def test_hsdp_accumulation_without_all_reduce():
    run_distributed(accumulate_without_all_reduce, 4)


def accumulate_with_sync(rank, world_size):
    pair = odd_mlp_pair(rank, world_size)
    for _ in range(2):
        for seed in range(3):
            pair.backward(lambda m, r, seed=seed: square_loss(m, rows_of(r, seed=seed)))
        pair.step()


def test_reduced_gradients_add_up():
    run_distributed(accumulate_with_sync, 3)
