"""Random values are those of an unsharded tensor with the same seed, on any number of ranks, for any placement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

from harness import run_distributed, world_sizes
from sharded import LAYOUTS, ROWS, assert_layout, assert_same, even, grid, line, shard

init = torch.nn.init

FILLS: dict[str, Any] = {
    "normal_": lambda x: x.normal_(0.5, 2.0),
    "uniform_": lambda x: x.uniform_(-1, 2),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "exponential_": lambda x: x.exponential_(2.0),
    "random_": lambda x: x.random_(0, 100),
    "cauchy_": lambda x: x.cauchy_(),
    "log_normal_": lambda x: x.log_normal_(),
    "geometric_": lambda x: x.geometric_(0.4),
    "init normal": lambda x: init.normal_(x, std=0.02),
    "init trunc_normal": lambda x: init.trunc_normal_(x, std=0.5, a=-0.7, b=0.7),
    "init xavier": init.xavier_uniform_,
    "init xavier normal": init.xavier_normal_,
    "init kaiming": lambda x: init.kaiming_uniform_(x, a=5**0.5),
    "init kaiming normal": lambda x: init.kaiming_normal_(x, mode="fan_out", nonlinearity="relu"),
    "init ones": init.ones_,
    "init constant": lambda x: init.constant_(x, 0.3),
}

DRAWS: dict[str, Any] = {
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.4),
    "poisson": lambda x: torch.poisson(x.abs()),
    "normal": lambda x: torch.normal(x, 0.5),
    "rrelu": lambda x: torch.nn.functional.rrelu(x, training=True),
}


def draw(rank: int, world_size: int, make: Any) -> None:
    mesh = line(world_size)
    for rows in ROWS:
        for what, operation in {**FILLS, **DRAWS}.items():
            if rows == 0 and what.startswith("init"):
                continue  # torch warns
            for dtype in (torch.float32, torch.bfloat16) if rows in (1, 7) else (torch.float32,):
                x = torch.ones(rows, 6, dtype=dtype)
                a = make(x, mesh)
                torch.manual_seed(11)
                expected = operation(x)
                state = torch.get_rng_state()
                torch.manual_seed(11)
                result = operation(a)
                assert torch.equal(torch.get_rng_state(), state), what
                assert_layout(result, a, what)
                assert_same(result, expected, (what, rows, dtype))
                if what in FILLS:
                    assert result is a


@pytest.mark.parametrize(("world_size", "make"), LAYOUTS)
def test_values_and_the_generator_are_those_of_an_unsharded_tensor(world_size: int, make: Any) -> None:
    run_distributed(draw, world_size, make)


def own_generator(rank: int, world_size: int) -> None:
    mesh = grid(2, 2)
    x = torch.zeros(7, 40)
    for make in (shard, even):
        a = make(x, mesh)
        generators = [torch.Generator().manual_seed(3) for _ in range(2)]
        before = torch.get_rng_state()
        assert_same(a.normal_(generator=generators[0]), x.normal_(generator=generators[1]))
        assert torch.equal(generators[0].get_state(), generators[1].get_state())
        assert torch.equal(torch.get_rng_state(), before)


def test_a_given_generator_on_replicas() -> None:
    run_distributed(own_generator, 4)


def modules(rank: int, world_size: int, make: Any) -> None:
    """``reset_parameters`` of layers whose parameters are sharded, the padding row of an embedding included."""
    mesh = line(world_size)
    for layer in (
        torch.nn.Linear(5, 7),
        torch.nn.Embedding(13, 4, padding_idx=9),
        torch.nn.Conv2d(3, 7, 3),
        torch.nn.LayerNorm(10),
        torch.nn.Bilinear(3, 4, 5),
    ):
        torch.manual_seed(1)
        layer.reset_parameters()
        expected = [p.detach().clone() for p in layer.parameters()]
        for name, parameter in list(layer.named_parameters()):
            setattr(layer, name, torch.nn.Parameter(make(torch.full_like(parameter, 9.0), mesh)))
        torch.manual_seed(1)
        layer.reset_parameters()
        for (name, parameter), value in zip(layer.named_parameters(), expected, strict=True):
            assert_same(parameter, value, (layer, name))


@pytest.mark.parametrize(("world_size", "make"), LAYOUTS)
def test_reset_parameters_of_torchs_layers(world_size: int, make: Any) -> None:
    run_distributed(modules, world_size, make)


def orthogonal(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    for make in (shard, even):
        for shape in ((7, 4), (4, 7), (5, 3, 2), (2, 3, 3)):
            x = torch.zeros(shape)
            a = make(x, mesh)
            torch.manual_seed(2)
            init.orthogonal_(x, gain=1.5)
            torch.manual_seed(2)
            init.orthogonal_(a, gain=1.5)
            assert_layout(a, make(x, mesh))
            assert_same(a, x, shape, exact=False)


@world_sizes(1, 3)
def test_orthogonal_init(world_size: int) -> None:
    run_distributed(orthogonal, world_size)


def other_shapes(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    weights = torch.arange(1.0, 8.0)
    torch.manual_seed(4)
    expected = torch.multinomial(weights, 3)
    torch.manual_seed(4)
    result: Any = torch.multinomial(shard(weights, mesh), 3)
    assert result.placements == (Replicate(),)
    assert_same(result, expected)


def test_draws_of_another_shape_are_replicated() -> None:
    run_distributed(other_shapes, 2)
