"""One rank's part of a run that trains a sharded and an unsharded model side by side."""

import math
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from raggedshard.cli.model import RECIPES, Recipe, loss_of
from raggedshard.torch import DTensor, fully_shard, init_device_mesh


@dataclass(frozen=True)
class Options:
    """What to train. ``reference_seed`` initialises the unsharded model; unlike ``seed`` the two must differ."""

    model: str
    steps: int
    seed: int
    reference_seed: int
    learning_rate: float = 1e-3


@dataclass(frozen=True)
class Tolerance:
    """``actual`` may be ``atol + rtol * |expected|`` away from ``expected``, element by element."""

    rtol: float
    atol: float

    def used(self, actual: torch.Tensor, expected: torch.Tensor) -> float:
        """The largest difference as a share of what is allowed: equal within the tolerance up to 1.0."""
        share = (actual - expected).abs() / (self.atol + self.rtol * expected.abs())
        largest = share.max().item() if share.numel() else 0.0
        return math.inf if math.isnan(largest) else largest


LOSS_TOLERANCE = Tolerance(rtol=1e-5, atol=1e-6)
PARAMETER_TOLERANCE = Tolerance(rtol=1e-4, atol=1e-5)
"""Wider than the loss's: Adam divides by the size of the gradient and so amplifies rounding where that is near zero."""


@dataclass(frozen=True)
class ParameterLayout:
    """Where a parameter's rows lie. ``rows`` were asked of each rank, not computed."""

    name: str
    shape: tuple[int, ...]
    placements: str
    rows: tuple[int, ...]
    row_bytes: int

    @property
    def uneven(self) -> bool:
        return len(set(self.rows)) > 1

    @property
    def padding_bytes(self) -> tuple[int, ...]:
        """Bytes that each rank adds in collectives, where every rank carries ``ceil(D / W)`` rows."""
        carried = -(-self.shape[0] // len(self.rows))
        return tuple((carried - rows) * self.row_bytes for rows in self.rows)


@dataclass(frozen=True)
class ParameterDifference:
    """The largest absolute difference of one parameter's elements, and the largest share of the tolerance used."""

    name: str
    largest: float
    tolerance_used: float


@dataclass
class Comparison:
    """How two models that train alike differ. Losses are mean nats per token over the global batch, one per step.

    Complete on rank 0 after `SideBySide.compare_parameters`; until then the parameters count as infinitely far apart.
    """

    layouts: list[ParameterLayout]
    sharded_losses: list[float] = field(default_factory=list)
    unsharded_losses: list[float] = field(default_factory=list)
    worst_parameter: ParameterDifference = field(default_factory=lambda: ParameterDifference("", math.inf, math.inf))

    @property
    def loss_differences(self) -> list[float]:
        return [abs(a - b) for a, b in zip(self.sharded_losses, self.unsharded_losses, strict=True)]

    @property
    def loss_tolerance_used(self) -> float:
        pair = (torch.tensor(losses, dtype=torch.float64) for losses in (self.sharded_losses, self.unsharded_losses))
        return LOSS_TOLERANCE.used(*pair)

    @property
    def equal(self) -> bool:
        return self.loss_tolerance_used <= 1 and self.worst_parameter.tolerance_used <= 1


class SideBySide:
    """The two models and their optimizers on one rank. The unsharded one lives on rank 0 alone.

    Every method is collective: all ranks call it.
    """

    def __init__(self, options: Options):
        self.options = options
        self.recipe: Recipe = RECIPES[options.model]
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.corpus = self.recipe.corpus()
        self.sharded = _build(self.recipe, options.seed)
        self._shard()
        self.optimizer = self._adamw(self.sharded)
        self.comparison = Comparison(self._layouts())
        if self.rank == 0:
            self.unsharded = _build(self.recipe, options.reference_seed)
            self.reference_optimizer = self._adamw(self.unsharded)

    def step(self, number: int) -> None:
        """One optimizer step of both models on the same global batch; adds the losses before it to the comparison."""
        rows = self.recipe.rows_per_rank
        inputs, targets = self.corpus.batch(self.options.seed, number, rows * self.world_size, self.recipe.context)
        mine = slice(self.rank * rows, (self.rank + 1) * rows)
        loss = _train_step(self.sharded, self.optimizer, inputs[mine], targets[mine])
        dist.all_reduce(loss)
        self.comparison.sharded_losses.append(loss.item() / self.world_size)
        if self.rank == 0:
            loss = _train_step(self.unsharded, self.reference_optimizer, inputs, targets)
            self.comparison.unsharded_losses.append(loss.item())

    def compare_parameters(self) -> None:
        """Gather each sharded parameter in full and note how far it is from the unsharded one."""
        worst = ParameterDifference("", 0.0, 0.0)
        for name, parameter in self._sharded_parameters():
            actual = parameter.full_tensor().detach()
            if self.rank == 0:
                expected = self.unsharded.get_parameter(name).detach()
                difference = (actual - expected).abs().max().item()
                used = PARAMETER_TOLERANCE.used(actual, expected)
                worst = max(worst, ParameterDifference(name, difference, used), key=lambda one: one.tolerance_used)
        self.comparison.worst_parameter = worst

    def _shard(self) -> None:
        mesh = init_device_mesh("cpu", (self.world_size,))
        for block in self.recipe.blocks(self.sharded):
            fully_shard(block, mesh=mesh)
        fully_shard(self.sharded, mesh=mesh)

    def _adamw(self, model: nn.Module) -> torch.optim.Optimizer:
        # Adam's first step is lr * g / (|g| + eps). With its default eps of 1e-8 and a gradient of that size, the order
        # in which float32 sums the gradient up would decide the step, on one process as on many.
        return torch.optim.AdamW(model.parameters(), lr=self.options.learning_rate, eps=1e-6)

    def _layouts(self) -> list[ParameterLayout]:
        parameters = self._sharded_parameters()
        rows_by_rank: list[list[int]] = [[]] * self.world_size
        dist.all_gather_object(rows_by_rank, [parameter.to_local().shape[0] for _, parameter in parameters])
        return [
            ParameterLayout(
                name,
                tuple(parameter.shape),
                ", ".join(repr(placement) for placement in parameter.placements),
                rows,
                parameter.element_size() * math.prod(parameter.shape[1:]),
            )
            for (name, parameter), rows in zip(parameters, zip(*rows_by_rank, strict=True), strict=True)
        ]

    def _sharded_parameters(self) -> list[tuple[str, DTensor]]:
        return [(name, cast(DTensor, parameter)) for name, parameter in self.sharded.named_parameters()]


def _build(recipe: Recipe, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return recipe.build()


def _train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    loss = loss_of(model, inputs, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
