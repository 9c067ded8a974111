"""Write rows of text as a table."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as lines whose columns are two spaces apart.

    The last column is not padded.
    """
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    lines = ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]
    return "\n".join(lines)
