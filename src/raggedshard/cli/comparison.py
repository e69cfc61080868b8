"""One rank's part of a run that trains a sharded and an unsharded model side by side."""

import math
from dataclasses import dataclass, field

import numpy as np

from raggedshard.cli.backend import Backend
from raggedshard.cli.recipes import RECIPES, Recipe


@dataclass(frozen=True)
class Options:
    """What to train. ``reference_seed`` initialises the unsharded model; unlike ``seed`` the two must differ."""

    model: str
    steps: int
    seed: int
    reference_seed: int


@dataclass(frozen=True)
class Tolerance:
    """``actual`` may be ``atol + rtol * |expected|`` away from ``expected``, element by element."""

    rtol: float
    atol: float

    def used(self, actual: np.ndarray, expected: np.ndarray) -> float:
        """The largest difference as a share of what is allowed: equal within the tolerance up to 1.0."""
        with np.errstate(invalid="ignore"):  # of infinities
            share = np.abs(actual - expected) / (self.atol + self.rtol * np.abs(expected))
        largest = float(share.max()) if share.size else 0.0
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
        return LOSS_TOLERANCE.used(np.array(self.sharded_losses), np.array(self.unsharded_losses))

    @property
    def equal(self) -> bool:
        return self.loss_tolerance_used <= 1 and self.worst_parameter.tolerance_used <= 1


class SideBySide:
    """The sharded and the unsharded training on one rank. The unsharded one lives on rank 0 alone.

    Every method is collective: all ranks call it.
    """

    def __init__(self, options: Options, backend: Backend):
        self.options, self.backend = options, backend
        self.recipe: Recipe = RECIPES[options.model]
        self.corpus = self.recipe.corpus()
        self.sharded = backend.training(options.model, options.seed, sharded=True)
        self.comparison = Comparison(self._layouts())
        if backend.rank == 0:
            self.unsharded = backend.training(options.model, options.reference_seed, sharded=False)

    def step(self, number: int) -> None:
        """One optimizer step of both models on the same global batch; adds the losses before it to the comparison."""
        rank, rows = self.backend.rank, self.recipe.rows_per_rank
        batch_size = rows * self.backend.world_size
        inputs, targets = self.corpus.batch(self.options.seed, number, batch_size, self.recipe.context)
        own = slice(rank * rows, (rank + 1) * rows)
        losses = self.backend.gather(np.array([self.sharded.step(inputs[own], targets[own])]))
        self.comparison.sharded_losses.append(float(losses.mean()))
        if rank == 0:
            self.comparison.unsharded_losses.append(self.unsharded.step(inputs, targets))

    def compare_parameters(self) -> None:
        """Gather each sharded parameter in full and note how far it is from the unsharded one."""
        worst = ParameterDifference("", 0.0, 0.0)
        for name in self.sharded.parameters():
            actual = self.sharded.values(name)
            if self.backend.rank == 0:
                expected = self.unsharded.values(name)
                difference = float(np.abs(actual - expected).max())
                used = PARAMETER_TOLERANCE.used(actual, expected)
                worst = max(worst, ParameterDifference(name, difference, used), key=lambda one: one.tolerance_used)
        self.comparison.worst_parameter = worst

    def agree_on_verdict(self) -> bool:
        """Whether rank 0, which alone can tell, found the two models equal."""
        own = self.backend.rank == 0 and self.comparison.equal
        return bool(self.backend.gather(np.array([float(own)]))[0, 0])

    def _layouts(self) -> list[ParameterLayout]:
        parameters = self.sharded.parameters()
        own_rows = [parameter.to_local().shape[0] for parameter in parameters.values()]
        rows = self.backend.gather(np.array(own_rows, np.float64)).astype(int).T
        return [
            ParameterLayout(
                name,
                tuple(parameter.shape),
                ", ".join(repr(placement) for placement in parameter.placements),
                tuple(rows_by_rank.tolist()),
                parameter.itemsize * math.prod(parameter.shape[1:]),
            )
            for (name, parameter), rows_by_rank in zip(parameters.items(), rows, strict=True)
        ]
