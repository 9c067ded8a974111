"""Say numbers and choices in sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

IN_BRACES = re.compile(r"(?<![\w}])\{([A-Za-z_]\w*)\}")
"""A name in braces, but not an argument in TeX, which follows a letter or a brace."""


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


def closest(name: str, known: Iterable[str], n: int = 1) -> list[str]:
    """Return up to ``n`` names that are like ``name``, swapped letters first."""
    close = get_close_matches(name, sorted(map(str, known)), n=10)
    return sorted(close, key=lambda other: sorted(other) != sorted(name))[:n]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about a name, which is empty if none is like it."""
    close = closest(name, known)
    return f"; did you mean {close[0]!r}?" if close else ""
