"""Begin an episode: the first observation, and the arguments of its row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coupler import Message
from coupler.errors import DataError


def with_observation(messages: Sequence[Message], seen: str) -> list[Message]:
    """Return a prompt with the first observation behind it."""
    *before, last = messages
    return [*before, {**last, "content": f"{last['content']}\n{seen}"}]


def kwargs_of(row: Mapping[str, Any], column: str) -> dict[str, Any]:
    """Return the arguments that a row has in a column. A null counts as absent, since a
    table has it where other rows have a value.

    Raises:
        DataError: the column holds no object.
    """
    found = row.get(column) or {}
    if not isinstance(found, Mapping):
        raise DataError(f"the row's {column} is a {type(found).__name__}, and no object.")
    return {key: value for key, value in found.items() if value is not None}
