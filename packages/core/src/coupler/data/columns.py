"""Give the columns of a source the names that a run reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from coupler.data.options import DataConfig
from coupler.errors import DataError

# Names of columns that one message lists.
MAX_LISTED = 30


class Columns:
    """Renames columns as ``prompt_key``, ``answer_key`` and ``columns`` say.

    A name with dots leads into nested mappings, where no column has that name as it
    stands. A column that already has the new name is hidden by the renamed one.
    """

    def __init__(self, config: DataConfig, key: str) -> None:
        self.key = key
        keys = {"prompt": config.prompt_key, "answer": config.answer_key}
        self.mapped = {**keys, **config.columns}
        self.options = {
            name: f"columns.{name}" if name in config.columns else f"{name}_key"
            for name in self.mapped
        }

        self.others = config.columns.keys() - keys.keys()
        self.lost = sorted(self.others)  # those that no row had so far
        self.seen: dict[str, None] = {}  # columns of the source, in order

    def source(self, name: str) -> str:
        """Return the column of the source that becomes ``name``."""
        return self.mapped[name]

    def take(self, row: Mapping[str, Any], name: str) -> Any:
        """Return the value of the column that becomes ``name``, or None."""
        return _value_at(row, self.mapped[name])

    def extra(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns but prompt and answer, under their new names."""
        taken = [(name, self.take(row, name)) for name in self.others]
        moved = {name: value for name, value in taken if value is not None}

        if self.lost:
            self.lost = [name for name in self.lost if name not in moved]
            self.seen |= dict.fromkeys(_names(row))

        gone = {*self.mapped.values(), *self.others}
        return {name: value for name, value in row.items() if name not in gone} | moved

    def missing(self, name: str, row: Mapping[str, Any]) -> str:
        """Say that ``row`` lacks the column that becomes ``name``, and what it has."""
        return self._missing(name, list(_names(row)))

    def check_found(self) -> None:
        """Refuse a column that no row had.

        Raises:
            DataError: there is one. The message names the columns that exist.
        """
        if self.lost and self.seen:
            raise DataError(f"no row has {self._missing(self.lost[0], list(self.seen))}")

    def _missing(self, name: str, has: list[str]) -> str:
        column, option = self.mapped[name], f"{self.key}.{self.options[name]}"
        close = get_close_matches(column, has, n=1, cutoff=0.5)
        guess = f" - did you mean {option}={close[0]}?" if close else f".\n  try:  {option}=COLUMN"
        more = f" and {len(has) - MAX_LISTED} more" if len(has) > MAX_LISTED else ""
        return f"{column!r}{guess}\n  it has:  {', '.join(has[:MAX_LISTED])}{more}"


def _value_at(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column, or of a nested one, or None."""
    if column in row or "." not in column:
        return row.get(column)
    first, _, rest = column.partition(".")
    inner = row.get(first)
    return _value_at(inner, rest) if isinstance(inner, Mapping) else None


def _names(row: Mapping[str, Any], start: str = "") -> Iterator[str]:
    """Yield the names of columns, and with dots those of nested mappings."""
    for name, value in row.items():
        if isinstance(value, Mapping) and value:
            yield from _names(value, f"{start}{name}.")
        else:
            yield f"{start}{name}"
