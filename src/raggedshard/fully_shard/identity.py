"""The number of a unit inside its collectives, so that ranks that run different units notice.

An all-gather carries the number itself. A reduction adds ranks up, so there the number travels as signs: one element
of +1 or -1 per bit. The sum over n ranks is +n or -n in every element exactly if all ranks sent the same number.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["CODE_LENGTH", "HEADER_BYTES", "code_agrees", "decode", "describe_mismatch", "encode"]

HEADER_BYTES = 8
"""An all-gather's header: the unit's number as an int64."""

CODE_LENGTH = 16
"""Elements of the sign code: up to 65536 units."""


def encode(unit: int) -> list[float]:
    """The sign code of a unit's number, least significant bit first."""
    return [1.0 if unit >> bit & 1 else -1.0 for bit in range(CODE_LENGTH)]


def decode(code: Sequence[float]) -> int:
    """The number in one rank's sign code."""
    return sum(1 << bit for bit, sign in enumerate(code) if sign > 0)


def code_agrees(total: Sequence[float], unit: int, ranks: int) -> bool:
    """Whether the sum of ``ranks`` ranks' codes says that all sent ``unit``."""
    return all(value == sign * ranks for value, sign in zip(total, encode(unit), strict=True))


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
