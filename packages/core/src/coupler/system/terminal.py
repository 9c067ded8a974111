"""Fit text that a model wrote to a terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence

WIDTH = 80
"""Columns that a line may have."""


def in_columns(rows: Sequence[tuple[str, str]]) -> str:
    """Return a line for each label and its text, with the texts below each other."""
    width = max((len(label) for label, _ in rows), default=0)
    return "\n".join(f"{label:{width}}  {text}" for label, text in rows)


# They join letters or keep them apart, in many scripts and in emoji.
JOINERS = "\u200c\u200d"


def harmless(text: str, *, lines: bool = False) -> str:
    """Replace what would move a terminal's cursor or colour it, and no spaces.

    Args:
        lines: keep line feeds and tabs, which otherwise show as a space.
    """
    letters = text.replace("\r\n", "\n") if lines else " ".join(text.split())
    kept = f"{JOINERS}\n\t" if lines else JOINERS
    return "".join(
        c if c.isprintable() or c in kept or unicodedata.category(c) == "Zs" else "\ufffd"
        for c in letters
    )


def cut(text: str, width: int = WIDTH) -> str:
    """Cut ``text`` to ``width`` columns of a terminal, and end it with an ellipsis."""
    if columns(text) <= width:
        return text

    used, kept = 0, ""
    for letter in text:
        used += columns(letter)
        if used > width - 1:
            break
        kept += letter
    return f"{kept}\u2026"


def fold(text: str, width: int = WIDTH) -> Iterator[str]:
    """Yield ``text`` in lines of at most ``width`` columns. No letter is lost."""
    line, used = "", 0
    for letter in text:
        size = columns(letter)
        if used + size > width:
            yield line
            line, used = "", 0
        line, used = line + letter, used + size
    yield line


def columns(text: str) -> int:
    """Return the columns that ``text`` takes in a terminal. Wide letters take two."""
    return sum(1 + (unicodedata.east_asian_width(letter) in "WF") for letter in text)
