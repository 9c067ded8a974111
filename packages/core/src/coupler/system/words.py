"""Say numbers and choices in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def count(number: int, noun: str) -> str:
    """Return the number with its noun, in the plural where it is not 1.

    Example:
        ``count(2, "process")`` is ``"2 processes"``.
    """
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def either(values: Sequence[object]) -> str:
    """Return the values with "or" between them."""
    return " or ".join(map(str, values))


def ceil_div(value: int, by: int) -> int:
    """Return ``value / by``, rounded up."""
    return -(-value // by)
