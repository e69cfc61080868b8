"""Steps that succeed on every rank or raise on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from raggedshard.checkpoint.errors import CheckpointError

__all__ = ["AllRanks", "Ranks", "SingleRank", "agree", "on_first_rank"]

Result = TypeVar("Result")


class Ranks(Protocol):
    """The ranks that save or load together; a backend brings its own collective."""

    rank: int
    size: int

    def exchange(self, message: bytes) -> list[bytes]:
        """Every rank's message, in rank order. Raises when a rank is gone."""
        ...


class AllRanks:
    """The ranks of a job.

    Args:
        all_gather_object: the framework's: fills a list of ``size`` entries with every rank's object.
    """

    def __init__(self, rank: int, size: int, all_gather_object: Callable[[list[Any], Any], Any]) -> None:
        self.rank, self.size = rank, size
        self._all_gather_object = all_gather_object

    def exchange(self, message: bytes) -> list[bytes]:
        messages: list[Any] = [None] * self.size
        self._all_gather_object(messages, message)
        return messages


class SingleRank:
    """A process on its own."""

    rank = 0
    size = 1

    def exchange(self, message: bytes) -> list[bytes]:
        return [message]


def agree(ranks: Ranks, step: Callable[[], Result]) -> Result:
    """Run ``step`` on every rank; it must not communicate.

    Raises:
        CheckpointError: the step failed on another rank, whose error it quotes.
        Exception: what the step raised on this rank.
    """
    result, failure = _attempt(step)
    messages = ranks.exchange(b"" if failure is None else f"{type(failure).__name__}: {failure}".encode())
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        if message:
            raise CheckpointError(f"rank {rank} failed: {message.decode()}")
    return result  # type: ignore[return-value]


def on_first_rank(ranks: Ranks, step: Callable[[], str]) -> str:
    """Run ``step`` on rank 0 only; its result on every rank. Raises as `agree`."""
    result = agree(ranks, step if ranks.rank == 0 else str)
    return ranks.exchange(result.encode())[0].decode()


def _attempt(step: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        return step(), None
    except Exception as error:  # raised by the caller, after every rank knows
        return None, error
