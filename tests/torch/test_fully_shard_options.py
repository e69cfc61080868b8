"""Every option of fully_shard, and every kind of parameter, trains like the unsharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness import run_distributed, world_sizes
from raggedshard.torch import FSDPModule, RaggedShard, fully_shard, init_device_mesh
from training import (
    OddMLP,
    Pair,
    assert_no_even_claim,
    dtensors,
    full,
    mesh_of,
    on_own_rows,
    rows_of,
    shard_odd_mlp,
    square_loss,
)


def twins(build: Callable[[], nn.Module]) -> tuple[nn.Module, Any]:
    """A model and its copy."""
    torch.manual_seed(0)
    reference = build()
    return reference, copy.deepcopy(reference)


# ---- reshard_after_forward


def train_with_reshard(rank, world_size, value, root_value, replicas):
    reference, model = twins(lambda: OddMLP().double())
    mesh = mesh_of(world_size, replicas)
    fully_shard(model.up, mesh=mesh, reshard_after_forward=value)
    fully_shard(model.even, mesh=mesh, reshard_after_forward=value)
    pair = Pair(rank, world_size, fully_shard(model, mesh=mesh, reshard_after_forward=root_value), reference)
    pair.train(on_own_rows, steps=3)
    on_own_rows(pair.sharded, rank)
    return {name: isinstance(param, DTensor) for name, param in pair.sharded.named_parameters()}


@pytest.mark.parametrize(("value", "root_value"), [(True, True), (False, False), (2, None), (1, 4), (4, 2)])
def test_reshard_after_forward(value, root_value):
    for sharded in run_distributed(train_with_reshard, 4, value, root_value, 1):
        assert sharded["up.weight"] == (value is not False)
        assert sharded["down.weight"] == (root_value is not None and root_value is not False)


def test_reshard_after_forward_to_smaller_groups_with_replicas():
    run_distributed(train_with_reshard, 4, 1, 2, 2)


def change_reshard(rank, world_size):
    reference, model = twins(lambda: OddMLP().double())
    pair = Pair(rank, world_size, shard_odd_mlp(model, mesh=mesh_of(world_size)), reference)
    for value in (True, False, True):
        pair.sharded.set_reshard_after_forward(value)
        pair.train(on_own_rows)
        on_own_rows(pair.sharded, rank)
        assert isinstance(pair.sharded.up.weight, DTensor) == value


def test_reshard_after_forward_may_change_between_steps():
    run_distributed(change_reshard, 3)


# ---- units


def train_list(rank, world_size, used):
    """``up`` and ``down`` make one unit: gathered before the first, resharded after the last."""
    reference, model = twins(lambda: OddMLP().double())
    mesh = mesh_of(world_size)
    units = fully_shard([model.up, model.down], mesh=mesh)
    assert units == [model.up, model.down] and all(isinstance(unit, FSDPModule) for unit in units)
    fully_shard(model, mesh=mesh)
    pair = Pair(rank, world_size, model, reference)
    pair.train(on_own_rows)
    if used == "some":  # one of the two runs, then the other
        pair.train(lambda m, r: square_loss(m.up, rows_of(r)))
        pair.train(lambda m, r: square_loss(m.down, rows_of(r)))
        pair.train(on_own_rows)


@pytest.mark.parametrize("used", ["all", "some"])
def test_a_list_of_modules_makes_one_unit(used):
    run_distributed(train_list, 3, used)


class Nested(nn.Module):
    """Units three deep, and one between them without parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Sequential(nn.Linear(8, 7), nn.Tanh()), nn.Linear(7, 5))
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def train_nested(rank, world_size):
    reference, model = twins(lambda: Nested().double())
    mesh = mesh_of(world_size)
    for module in (model.inner[0][0], model.inner[0], model.inner, model):
        fully_shard(module, mesh=mesh)
    pair = Pair(rank, world_size, model, reference)
    pair.train(on_own_rows)
    assert [name for name, _ in pair.sharded.named_parameters()] == [name for name, _ in reference.named_parameters()]


def test_units_nest():
    run_distributed(train_nested, 3)


def train_on_default_mesh(rank, world_size):
    reference, model = twins(lambda: OddMLP().double())
    fully_shard(model.up)
    pair = Pair(rank, world_size, fully_shard(model), reference)
    pair.train(on_own_rows)
    weight = pair.sharded.up.weight
    return weight.placements, tuple(weight.device_mesh.shape), tuple(weight.to_local().shape)


@world_sizes(1, 3)
def test_without_a_mesh_all_ranks_shard(world_size):
    values = run_distributed(train_on_default_mesh, world_size)
    placement = Shard(0) if world_size == 1 else RaggedShard((0,), (3, 3, 1))
    rows = [7] if world_size == 1 else [3, 3, 1]
    assert values == [((placement,), (world_size,), (n, 8)) for n in rows]


# ---- shard_placement_fn


class Two(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape))
        self.other = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x.sum() * self.weight).sum() + (x.mean() * self.other).sum()


def train_with_placement(rank, world_size, shape, requested, replicas):
    reference, model = twins(lambda: Two(*shape).double())
    model = fully_shard(
        model, mesh=mesh_of(world_size, replicas), shard_placement_fn=lambda p: requested if p.ndim > 1 else None
    )
    pair = Pair(rank, world_size, model, reference)
    pair.train(lambda m, r: m(rows_of(r)), steps=3)
    return model.weight.placements, tuple(model.weight.to_local().shape)


@pytest.mark.parametrize(
    ("shape", "requested", "shapes"),
    [
        ((3, 8), Shard(1), [(3, 2)] * 4),
        ((3, 8), Shard(-1), [(3, 2)] * 4),
        ((2, 5, 4), Shard(2), [(2, 5, 1)] * 4),
        ((7, 2), Shard(0), [(2, 2), (2, 2), (2, 2), (1, 2)]),
        ((8, 2), RaggedShard((0,), (3, 0, 1, 0)), [(6, 2), (0, 2), (2, 2), (0, 2)]),
        ((8, 2), RaggedShard((0,), (1, 1, 1, 1)), [(2, 2)] * 4),
        ((7, 2), RaggedShard((0,), (0, 0, 0, 7)), [(0, 2), (0, 2), (0, 2), (7, 2)]),
        ((3, 4, 2), RaggedShard((0, 1), (1, 2, 0, 3)), [(2, 2), (4, 2), (0, 2), (6, 2)]),
        ((2, 3, 2), RaggedShard((0, 1, 2), (1, 0, 1, 1)), [(4,), (0,), (4,), (4,)]),
    ],
    ids=str,
)
def test_shard_placement_fn(shape, requested, shapes):
    values = run_distributed(train_with_placement, 4, shape, requested, 1)
    assert [value[1] for value in values] == shapes
    expected = {Shard(-1): Shard(1), Shard(0): RaggedShard((0,), (2, 2, 2, 1))}.get(requested, requested)
    assert all(value[0] == (expected,) for value in values)


def test_shard_placement_fn_with_replicas():
    values = run_distributed(train_with_placement, 4, (6, 2), RaggedShard((0,), (1, 2)), 2)
    assert values == [((Replicate(), RaggedShard((0,), (1, 2))), (rows, 2)) for rows in (2, 4, 2, 4)]


# ---- parameters of all kinds


class Kinds(nn.Module):
    """Parameters that need care: of no rows, of integers and bools, not contiguous, of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 7, dtype=torch.float64))
        self.transposed = nn.Parameter(torch.randn(3, 7, dtype=torch.float64).t())
        self.strided = nn.Parameter(torch.randn(5, 6, dtype=torch.float64)[:, ::2])
        self.none = nn.Parameter(torch.empty(0, 4, dtype=torch.float64))
        self.single = nn.Parameter(torch.randn(7, dtype=torch.float32))
        self.bfloat = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.index = nn.Parameter(torch.tensor([2, 0, 1]), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True, True, False]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x @ self.weight) * self.single
        x = (x @ self.transposed)[:, self.index]
        return (x @ self.strided.t()) * self.mask * self.bfloat + self.none.sum() + self.none.shape[0]


def train_kinds(rank, world_size, replicas):
    reference, model = twins(Kinds)
    pair = Pair(rank, world_size, fully_shard(model, mesh=mesh_of(world_size, replicas)), reference, optimizer=None)
    for _ in range(2):
        pair.backward(on_own_rows)
    coarse = {"single": 1e-5, "bfloat": 0.05}  # float32, and bfloat16 sums in another order
    for name, param in reference.named_parameters():
        own = dtensors(model)[name]
        assert own.shape == param.shape and own.dtype == param.dtype and own.requires_grad == param.requires_grad
        assert torch.equal(full(own), param)
        grad: Any = own.grad
        assert (grad is None) == (param.grad is None), name
        if param.grad is not None:
            assert grad.dtype == param.dtype and grad.placements == own.placements
            atol = 1e-6 if name in coarse else 1e-9
            torch.testing.assert_close(full(grad), param.grad, rtol=coarse.get(name, 0), atol=atol)


@world_sizes(1, 2, 4)
def test_parameters_of_all_kinds_and_dtypes_in_one_unit(world_size):
    run_distributed(train_kinds, world_size, 1)


def test_parameters_of_all_kinds_with_replicas():
    run_distributed(train_kinds, 4, 2)


def train_ignored(rank, world_size):
    reference, model = twins(lambda: OddMLP().double())
    ignored = {model.mid.weight, model.down.bias}
    mesh = mesh_of(world_size)
    fully_shard(model.up, mesh=mesh, ignored_params=ignored)
    model = fully_shard(model, mesh=mesh, ignored_params=ignored)
    assert {name for name, p in model.named_parameters() if not isinstance(p, DTensor)} == {"mid.weight", "down.bias"}
    on_own_rows(model, rank).backward()
    on_own_rows(reference, rank).backward()
    for name in ("mid.weight", "down.bias"):  # left alone: this rank's own gradient
        assert torch.equal(full(model.get_parameter(name).grad), full(reference.get_parameter(name).grad))


def test_ignored_parameters_are_left_alone():
    run_distributed(train_ignored, 3)


# ---- frozen parameters


FROZEN = {
    "one": ("mid.weight",),
    "a whole unit": ("up.weight", "up.bias"),
    "all but one": ("up.weight", "up.bias", "mid.weight", "one.weight", "one.bias", "even.weight", "down.weight"),
    "biases": ("up.bias", "one.bias", "even.bias", "down.bias"),
}


def freeze(model: nn.Module, names: tuple[str, ...], frozen: bool = True) -> None:
    for name in names:
        model.get_parameter(name).requires_grad_(not frozen)


def train_frozen(rank, world_size, names):
    def build() -> nn.Module:
        model = OddMLP().double()
        freeze(model, names)
        return model

    reference, model = twins(build)
    pair = Pair(rank, world_size, shard_odd_mlp(model, mesh=mesh_of(world_size)), reference)
    before = {name: full(p).clone() for name, p in dtensors(model).items()}
    pair.train(on_own_rows)
    for name, param in dtensors(model).items():
        assert torch.equal(full(param), before[name]) == (name in names)


@pytest.mark.parametrize("names", FROZEN.values(), ids=FROZEN.keys())
def test_frozen_parameters_in_any_mix(names):
    run_distributed(train_frozen, 3, names)


def toggle_frozen(rank, world_size, reshard):
    """Freezing and unfreezing between steps is followed, also by units that stay unsharded."""
    reference, model = twins(lambda: OddMLP().double())
    shard_odd_mlp(model, mesh=mesh_of(world_size), reshard_after_forward=reshard)
    model.set_reshard_after_backward(reshard)
    sharded = dtensors(model)  # the Parameters that optimizers hold
    pair = Pair(rank, world_size, model, reference)
    for names in (*FROZEN.values(), ()):
        for name, param in sharded.items():
            param.requires_grad_(name not in names)
            reference.get_parameter(name).requires_grad_(name not in names)
        pair.backward(on_own_rows)
        for name, param in sharded.items():
            grad = reference.get_parameter(name).grad
            assert (param.grad is None) == (grad is None) == (name in names), name
            if grad is not None:
                torch.testing.assert_close(full(param.grad), grad, rtol=0, atol=1e-9)
        for optimizer in pair.optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("reshard", [True, False])
def test_parameters_may_be_frozen_and_unfrozen_between_steps(reshard):
    run_distributed(toggle_frozen, 3, reshard)


# ---- tied weights


class Tied(nn.Module):
    """An embedding of 7 rows that is the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


def tied_loss(model: nn.Module, rank: int) -> torch.Tensor:
    tokens = torch.tensor([[0, 2, 4, 6], [1, 3, 5, 6]])[rank % 2]
    return nn.functional.cross_entropy(model(tokens), tokens.roll(1))


def train_tied(rank, world_size, replicas, together):
    reference, model = twins(lambda: Tied().double())
    mesh = mesh_of(world_size, replicas)
    fully_shard(model.body, mesh=mesh)
    if together:
        fully_shard([model.embedding, model.head], mesh=mesh)
    pair = Pair(rank, world_size, fully_shard(model, mesh=mesh), reference)
    assert model.head.weight is model.embedding.weight
    assert_no_even_claim(model, world_size // replicas)
    before = full(model.embedding.weight).clone()
    pair.train(tied_loss, steps=3)
    assert model.head.weight is model.embedding.weight
    moved = (full(model.embedding.weight) - before).abs().amin(dim=1)
    assert moved.min() > 1e-3, "a row did not move"
    assert len(list(model.parameters())) == 3
    return tuple(model.head.weight.to_local().shape)


@pytest.mark.parametrize("together", [False, True])
def test_tied_weights_train_to_the_last_ranks_rows(together):
    assert run_distributed(train_tied, 4, 1, together) == [(2, 8), (2, 8), (2, 8), (1, 8)]


def test_tied_weights_train_with_replicas():
    assert run_distributed(train_tied, 4, 2, False) == [(4, 8), (3, 8), (4, 8), (3, 8)]


# ---- the divide factor


def train_with_factor(rank, world_size, replicas, factor):
    reference, model = twins(lambda: OddMLP().double())
    model = fully_shard(model, mesh=mesh_of(world_size, replicas))
    model.set_gradient_divide_factor(factor)
    on_own_rows(model, rank).backward()
    for r in range(world_size):
        (on_own_rows(reference, r) / factor).backward()
    for name, param in dtensors(model).items():
        torch.testing.assert_close(full(param.grad), reference.get_parameter(name).grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("world_size", "replicas"), [(1, 1), (3, 1), (4, 2)])
def test_gradient_divide_factor(world_size, replicas):
    for factor in (1.0, 6.0):
        run_distributed(train_with_factor, world_size, replicas, factor)


def train_without_dim_names(rank, world_size):
    reference, model = twins(lambda: OddMLP().double())
    model = fully_shard(model, mesh=init_device_mesh("cpu", (2, 2)))
    Pair(rank, world_size, model, reference).train(on_own_rows)


def test_a_mesh_needs_no_dim_names():
    run_distributed(train_without_dim_names, 4)
