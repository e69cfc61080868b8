"""The number of a unit inside its collectives, so that ranks that run different units notice.

An all-gather carries the number itself. A reduction has a slot for each replica, which only that replica fills: a sum
over replicas leaves the slots as they are. Digits are small, so that every floating-point dtype holds and adds them
exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsComplex

__all__ = ["DIGITS", "HEADER_BYTES", "decode", "describe_mismatch", "encode"]

HEADER_BYTES = 8
"""An all-gather's header: the unit's number as an int64."""

DIGITS = 3
"""Elements of a number in a reduction."""

_BASE = 128
"""bfloat16 holds all integers up to 256."""


def encode(unit: int) -> list[float]:
    """The digits of a unit's number, the least significant first."""
    return [float(unit // _BASE**i % _BASE) for i in range(DIGITS)]


def decode(digits: Sequence[SupportsComplex]) -> int:
    """The number in a rank's digits; -1 for something else, as from a rank that takes part in another collective."""
    values = [complex(digit).real for digit in digits]
    if not all(0 <= value < _BASE and value.is_integer() for value in values):
        return -1
    return sum(int(value) * _BASE**i for i, value in enumerate(values))


def describe_mismatch(action: str, unit: int, names: Sequence[str], others: dict[int, int]) -> str:
    """The error text for ranks that run different units.

    Args:
        action: what the collective does, e.g. ``"all-gather"``.
        unit: this rank's unit.
        names: the units' names by number.
        others: group rank -> the number it sent, for the ranks that differ.
    """

    def name(number: int) -> str:
        return f"'{names[number] or '(root)'}'" if 0 <= number < len(names) else f"an unknown unit ({number})"

    seen = ", ".join(f"rank {rank} of the group runs {name(number)}" for rank, number in sorted(others.items()))
    return (
        f"{action} of unit {name(unit)}: {seen}. All ranks must run the same units in the same order; a rank that has "
        "no input for a module must still call it (e.g. on an empty or dummy batch)"
    )
