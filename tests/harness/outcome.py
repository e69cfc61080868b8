"""How a rank's run of a function ended, and the report of a run that failed."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class RankOutcome:
    """How one rank's run ended.

    kind: ``returned``; ``raised`` (an exception); ``died`` (the process ended by itself); ``hung`` (still running at
        the timeout, killed).
    value: what the function returned; None unless ``returned``.
    error: ``TypeName: message`` of the exception; empty unless ``raised``.
    report: traceback, exit code or the stacks of all threads, for a person to read; empty when ``returned``.
    seconds: from the start of the run to this end.
    """

    rank: int
    kind: Literal["returned", "raised", "died", "hung"]
    seconds: float
    value: Any = None
    error: str = ""
    report: str = ""

    @property
    def failed(self) -> bool:
        return self.kind != "returned"


class DistributedError(AssertionError):
    """At least one rank of a distributed run failed. ``outcomes`` holds every rank's end, in rank order."""

    def __init__(self, name: str, outcomes: list[RankOutcome]):
        self.outcomes = outcomes
        super().__init__(_describe(name, outcomes))


def _describe(name: str, outcomes: list[RankOutcome]) -> str:
    """The rank that failed first leads: the others mostly fail because of it."""
    failures = sorted((outcome for outcome in outcomes if outcome.failed), key=lambda outcome: outcome.seconds)
    first = failures[0]
    summary = ", ".join(f"rank {outcome.rank} {outcome.kind}" for outcome in outcomes)
    lines = [f"{name} failed, first on rank {first.rank} of {len(outcomes)} ({first.error or first.kind}); {summary}"]
    for outcome in failures:
        lines.append(f"--- rank {outcome.rank} {outcome.kind} after {outcome.seconds:.1f} s")
        lines.append(outcome.report.rstrip())
    return "\n".join(lines)
