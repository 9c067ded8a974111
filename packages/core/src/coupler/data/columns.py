"""Give the columns of a source the names that a run reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from coupler.data.options import DataConfig
from coupler.errors import DataError

# Names of columns that one message lists.
MAX_LISTED = 30

# Names that datasets have for the columns that every run reads.
ALSO = {
    "prompt": ("messages", "question", "problem", "instruction", "query", "input", "conversations"),
    "answer": ("solution", "response", "completion", "target", "ground_truth", "output", "label"),
}


class Columns:
    """Renames columns as ``prompt_key``, ``answer_key`` and ``columns`` say.

    A name with dots leads into nested mappings, where no column has that name as it
    stands. A column that already has the new name is hidden by the renamed one.

    Attributes:
        needed: columns that every row must have, beside prompt and answer.

    Args:
        conversations: whether ``messages`` may stand for prompt and answer.
    """

    needed: tuple[str, ...] = ()

    def __init__(self, config: DataConfig, key: str, conversations: bool = False) -> None:
        self.key, self.conversations = key, conversations
        self.mapped = {
            **({"messages": "messages"} if conversations else {}),
            "prompt": config.prompt_key,
            "answer": config.answer_key,
            **config.columns,
        }
        # An answer that the user has placed is looked for nowhere else.
        self.answer_is_placed = "answer" in config.columns
        self.given = config.columns
        self.others = [name for name in config.columns if name not in ("prompt", "answer")]

        self.lost = self.others  # those that no row had so far
        self.seen: dict[str, None] = {}  # columns of the source, in order

    def source(self, name: str) -> str:
        """Return the column of the source that becomes ``name``."""
        return self.mapped[name]

    def take(self, row: Mapping[str, Any], name: str) -> Any:
        """Return the value of the column that becomes ``name``, or None."""
        return _value_at(row, self.mapped[name])

    def others_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns but prompt and answer, under their new names."""
        gone = {*self.mapped.values(), *self.others}
        found = {name: value for name, value in row.items() if name not in gone}
        for name in self.others:
            value = self.take(row, name)
            if value is not None:
                found[name] = value

        if self.lost:
            self.lost = [name for name in self.lost if name not in found]
            self.seen |= dict.fromkeys(_names(row))
        return found

    def lacking(self, row: Mapping[str, Any]) -> str:
        """Say which of the columns :attr:`needed` a row lacks, and what it has.

        The text is empty where it has them all.
        """
        lost = [name for name in self.needed if self.take(row, name) is None]
        return self.missing(lost[0], row) if lost else ""

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
        column = self.mapped[name]
        option = f"{self.key}.{name}_key"
        if name in self.given:
            option = f"{self.key}.columns.{name}"
        close = get_close_matches(column, _with_inner(has), n=1, cutoff=0.5)

        listed = ", ".join(has[:MAX_LISTED])
        if len(has) > MAX_LISTED:
            listed = f"{listed} and {len(has) - MAX_LISTED} more"
        if close:
            return f"{column!r} - did you mean {option}={close[0]}?\n  it has:  {listed}"
        usual = [other for other in ALSO.get(name, ()) if other in has]
        guess = usual[0] if usual else "COLUMN"
        return f"{column!r}.\n  try:  {option}={guess}\n  it has:  {listed}"


def _with_inner(names: list[str]) -> list[str]:
    """Return nested names, and those of the mappings that they lie in."""
    inner: dict[str, None] = {}
    for name in names:
        outer = name.rpartition(".")[0]
        while outer:
            inner[outer] = None
            outer = outer.rpartition(".")[0]
    return [*inner, *names]


def _value_at(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column, or of a nested one, or None."""
    if column in row:
        return row[column]
    first, _, rest = column.partition(".")
    inner = row.get(first)
    if rest and isinstance(inner, Mapping):
        return _value_at(inner, rest)
    return None


def _names(row: Mapping[str, Any], start: str = "") -> Iterator[str]:
    """Yield the names of columns, and with dots those of nested mappings."""
    for name, value in row.items():
        if isinstance(value, Mapping) and value:
            yield from _names(value, f"{start}{name}.")
        else:
            yield f"{start}{name}"
