"""Trains a sharded model beside the unsharded one on the same global batches and compares all there is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from raggedshard.torch import DeviceMesh, FSDPModule, fully_shard, init_device_mesh

GLOBAL_BATCH = 12
"""Divides by 1, 2, 3 and 4 ranks."""


class OddMLP(nn.Module):
    """(7, 8)-like weights: row counts 7, 5, 1, 8 and 3, with and without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 7)
        self.mid = nn.Linear(7, 5, bias=False)
        self.one = nn.Linear(5, 1)
        self.even = nn.Linear(5, 8)
        self.down = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.mid(torch.tanh(self.up(x))))
        return self.down(torch.tanh(self.even(x)) * self.one(x))


def shard_odd_mlp(model: OddMLP, **options: Any) -> FSDPModule:
    """Three units: up, even, and the root with the rest."""
    fully_shard(model.up, **options)
    fully_shard(model.even, **options)
    return fully_shard(model, **options)


@dataclass
class Tolerances:
    """``(rtol, atol)`` for losses and gradients, and for parameters."""

    gradients: tuple[float, float]
    parameters: tuple[float, float]

    @classmethod
    def of(cls, dtype: torch.dtype, adam: bool) -> Tolerances:
        """design.md's: float64 under 1e-9; float32 1e-5 / 1e-6, parameters after Adam-like steps 1e-4 / 1e-5."""
        if dtype == torch.float64:
            return cls((0.0, 1e-9), (0.0, 1e-9))
        return cls((1e-5, 1e-6), (1e-4, 1e-5) if adam else (1e-5, 1e-6))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    # Where a gradient is zero but for rounding (the biases of attention's keys), Adam would turn rounding into steps.
    "adamw with a large eps": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-4),
}


def mesh_of(world_size: int, replicas: int = 1) -> DeviceMesh:
    """1-D, or ``(replicate, shard)`` when there are replicas."""
    if replicas == 1:
        return init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))


def float_batches(steps: int, dtype: torch.dtype, features: int = 8) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(GLOBAL_BATCH, features, dtype=dtype, generator=generator)


def own_part(batch: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    return batch.chunk(world_size)[rank]


def square_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def dtensors(model: nn.Module) -> dict[str, DTensor]:
    """The sharded parameters by name."""
    return {name: param for name, param in model.named_parameters() if isinstance(param, DTensor)}


def assert_same_parameters(model: nn.Module, reference: nn.Module, rtol: float, atol: float) -> None:
    expected = dict(reference.named_parameters())
    actual = dict(model.named_parameters())
    assert list(actual) == list(expected)
    for name, param in actual.items():
        torch.testing.assert_close(full(param), expected[name].detach(), rtol=rtol, atol=atol, msg=_named(name))


def assert_same_gradients(model: nn.Module, reference: nn.Module, rtol: float, atol: float) -> None:
    """Every gradient equals the unsharded one, is absent where that is, and has its parameter's placements."""
    expected = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        grad = expected[name].grad
        assert (param.grad is None) == (grad is None), name
        if param.grad is None or grad is None:
            continue
        if isinstance(param, DTensor):
            assert isinstance(param.grad, DTensor), name
            assert param.grad.placements == param.placements, name
            assert param.grad.shape == param.shape, name
        torch.testing.assert_close(full(param.grad), grad, rtol=rtol, atol=atol, msg=_named(name))


def _named(name: str) -> Callable[[str], str]:
    return lambda message: f"{name}: {message}"


def assert_no_even_claim(model: nn.Module, shards: int) -> None:
    """No ``Shard(0)`` on a parameter whose rows do not divide."""
    for name, param in model.named_parameters():
        if isinstance(param, DTensor) and param.shape[0] % shards:
            assert not any(type(placement) is Shard and placement.dim == 0 for placement in param.placements), name


def train_beside(
    rank: int,
    world_size: int,
    sharded: nn.Module,
    reference: nn.Module,
    optimizer: str,
    batches: Iterator[Any],
    loss_of: Callable[[nn.Module, Any], torch.Tensor] = square_loss,
    dtype: torch.dtype = torch.float64,
    ranks: int | None = None,
    part: int | None = None,
) -> list[float]:
    """Step both models and compare losses, every gradient and every parameter after each step; returns the losses.

    ranks, part: the number of data-parallel ranks and this one's index, where they are not all ranks.
    """
    ranks, part = ranks or world_size, rank if part is None else part
    tolerances = Tolerances.of(dtype, adam=optimizer.startswith("adamw"))
    own, theirs = OPTIMIZERS[optimizer](sharded.parameters()), OPTIMIZERS[optimizer](reference.parameters())
    losses = []
    for batch in batches:
        expected = loss_of(reference, batch)
        expected.backward()
        loss = loss_of(sharded, own_part(batch, part, ranks))
        loss.backward()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        rtol, atol = tolerances.gradients
        torch.testing.assert_close(mean / world_size, expected.detach(), rtol=rtol, atol=atol)
        assert_same_gradients(sharded, reference, rtol, atol)
        own.step()
        theirs.step()
        assert_same_parameters(sharded, reference, *tolerances.parameters)
        own.zero_grad()
        theirs.zero_grad()
        losses.append(expected.item())
    return losses


class Pair:
    """A sharded model and its unsharded twin, stepped by hand.

    The twin sees every rank's part: its gradients are the mean over the ranks of what each rank's loss gives.
    """

    def __init__(
        self, rank: int, world_size: int, sharded: Any, reference: nn.Module, optimizer: str | None = "adamw"
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.sharded, self.reference = sharded, reference
        models = (sharded, reference)
        make = OPTIMIZERS.get(optimizer or "")
        self.optimizers = [make(p for p in m.parameters() if p.requires_grad) for m in models] if make else []

    def backward(self, loss_of: Callable[[Any, int], torch.Tensor]) -> torch.Tensor:
        """Backward of ``loss_of(model, rank)`` on both; returns this rank's own loss, which is checked."""
        expected = [loss_of(self.reference, rank) for rank in range(self.world_size)]
        for loss in expected:
            (loss / self.world_size).backward()
        own = loss_of(self.sharded, self.rank)
        own.backward()
        torch.testing.assert_close(own, expected[self.rank], rtol=0, atol=1e-9)
        return own.detach()

    def check_gradients(self) -> None:
        assert_same_gradients(self.sharded, self.reference, 0, 1e-9)

    def step(self) -> None:
        """Compare gradients, step both optimizers, compare parameters, drop the gradients."""
        self.check_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(self.sharded, self.reference, 0, 1e-9)

    def train(self, loss_of: Callable[[Any, int], torch.Tensor], steps: int = 2) -> None:
        for _ in range(steps):
            self.backward(loss_of)
            self.step()


def rows_of(rank: int, rows: int = 4, features: int = 8, seed: int = 0) -> torch.Tensor:
    """A batch of a rank's own, the same wherever it is asked for."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(rows, features, dtype=torch.float64, generator=generator)


def on_own_rows(model: nn.Module, rank: int) -> torch.Tensor:
    return square_loss(model, rows_of(rank))


def odd_mlp_pair(rank: int, world_size: int, replicas: int = 1, **options: Any) -> Pair:
    torch.manual_seed(0)
    reference = OddMLP().double()
    model = shard_odd_mlp(copy.deepcopy(reference), mesh=mesh_of(world_size, replicas), **options)
    return Pair(rank, world_size, model, reference)


def pair_of(
    rank: int, world_size: int, build: Callable[[], nn.Module], units: tuple[str, ...] = (), **options: Any
) -> Pair:
    """``build()`` and its copy, of which the submodules ``units`` and the root become units."""
    torch.manual_seed(0)
    reference = build().double()
    model = copy.deepcopy(reference)
    mesh = mesh_of(world_size)
    for name in units:
        fully_shard(model.get_submodule(name), mesh=mesh, **options)
    return Pair(rank, world_size, fully_shard(model, mesh=mesh, **options), reference)


def all_sharded(model: nn.Module) -> bool:
    return all(isinstance(param, DTensor) for param in model.parameters())
