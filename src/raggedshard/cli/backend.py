"""What ``raggedshard train`` needs of a framework. Everything else of the command is written once.

A framework has three modules: ``..._start`` makes the processes, ``..._training`` trains in one of them, and a model.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol, cast

import numpy as np

BackendName = Literal["torch", "mindspore"]


@dataclass(frozen=True)
class AdamW:
    """The optimizer's numbers, the same on every framework."""

    learning_rate: float = 1e-3
    weight_decay: float = 1e-2
    epsilon: float = 1e-6
    """Adam's first step is ``lr * g / (|g| + eps)``. With the usual eps of 1e-8 and a gradient of that size, the order
    in which float32 sums the gradient up would decide the step, on one process as on many."""


class Training(Protocol):
    """A model and its optimizer, on one rank. Where the model is sharded, every method is collective."""

    def step(self, inputs: np.ndarray, targets: np.ndarray) -> float:
        """One optimizer step on int64 tokens of shape (batch, time); the mean loss before it, in nats per token."""
        ...

    def parameters(self) -> dict[str, Any]:
        """The framework's own by name; DTensors where the model is sharded."""
        ...

    def values(self, name: str) -> np.ndarray:
        """The whole of one parameter."""
        ...


class Backend(Protocol):
    """A framework on one rank, which has joined the others."""

    title: str
    """The framework's name as people write it."""
    rank: int
    world_size: int

    def training(self, model: str, seed: int, *, sharded: bool) -> Training:
        """A new model of ``recipes.RECIPES``. Collective if it is sharded."""
        ...

    def gather(self, numbers: np.ndarray) -> np.ndarray:
        """Every rank's float64 numbers, shape (n,), as the rows of one array. Collective."""
        ...


class Start(Protocol):
    """How processes come to be: by the framework's launcher, or started by the command. A module."""

    LAUNCHER: str

    def launched_processes(self) -> int | None:
        """How many processes the launcher started, if it started this one."""
        ...

    def join(self) -> Backend:
        """Make a process that the launcher started one of the ranks."""
        ...

    def leave(self, code: int) -> NoReturn:
        """End a process that the launcher started."""
        ...

    def run_ranks(self, world_size: int, job: Callable[[Backend], bool]) -> bool:
        """Run the job on every rank of new processes; what rank 0 returned. An error of one rank is raised here."""
        ...


def start_of(backend: BackendName) -> Start:
    """Imports what the command's own process needs, which may be less than the framework."""
    return cast(Start, importlib.import_module(f"raggedshard.cli.{backend}_start"))
