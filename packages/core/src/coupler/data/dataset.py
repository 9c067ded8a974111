"""Load rows, and check each of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date, time
from decimal import Decimal
from itertools import islice
from math import isfinite, isnan
from typing import Any

import numpy as np

from coupler.data.columns import Columns
from coupler.data.options import DataConfig
from coupler.data.sources import EXAMPLE, read
from coupler.errors import DataError
from coupler.system.plain_values import MAX_INTEGER

# Levels of lists and mappings in a column.
MAX_DEPTH = 64
# Messages in order: role, content, and the other keys that the chat template reads.
Messages = tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt with its answer and other columns. All of it is plain JSON, so that it
    reaches reward workers.

    Example:
        ``Row("1 + 2 = ?", "3", 0, {"data_source": "sums"})``
    """

    prompt: str | Messages
    answer: str  # a string of the data as it is, anything else as JSON text
    index: int  # number of the row in its source, from 0
    extra: Mapping[str, Any]  # every other column; nulls are left out

    def as_mapping(self) -> Mapping[str, Any]:
        """Return the row as reward functions see it: ``index``, the extra columns,
        ``prompt`` and ``answer``.
        """
        return {"index": self.index, **self.extra, "prompt": self.prompt, "answer": self.answer}

    def place(self, source: str) -> str:
        """Say in words where the row stands in ``source``."""
        return f"row {self.index} (from 0) of {source}"

    @property
    def data_source(self) -> str:
        """Return the column ``data_source`` as text, empty where the row has none."""
        return str(self.extra.get("data_source", ""))

    @property
    def is_conversation(self) -> bool:
        """Tell whether the row is a whole conversation, whose answers are in it."""
        said = not isinstance(self.prompt, str) and any(
            message["role"] == "assistant" for message in self.prompt
        )
        return said and not self.answer

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """The column ``tools``, if it holds OpenAI JSON schemas.

        Anything else in it is for the reward or the environment alone.
        """
        found = self.extra.get("tools")
        if not isinstance(found, list):
            return ()
        schemas = [each for each in found if isinstance(each, Mapping) and "function" in each]
        return tuple(schemas) if len(schemas) == len(found) else ()


def load_rows(
    config: DataConfig, key: str = "data", columns: Callable[[DataConfig, str], Columns] = Columns
) -> list[Row]:
    """Load and check the rows of ``config.source``, the first ``config.limit`` if that
    is positive.

    ``key`` is the section of the configuration that ``config`` is, for messages, and
    ``columns`` gives the columns of its source their names. Where these allow
    conversations, a row may have the column ``messages`` in the place of a prompt and
    an answer: see :attr:`Row.is_conversation`.

    The answer is column ``answer``, or ``reward_model.ground_truth`` where a row has no
    such column. ``answer_key=""`` says that the reward needs none.

    Raises:
        DataError: the source is missing, empty or malformed, a row lacks a column or
            has one of a wrong type, or no row has a column of ``config.columns``.
    """
    mapping = columns(config, key)
    with source_named(config, key):
        rows = list(_rows(config, key, mapping))
        mapping.check_found()
    if not rows:
        raise DataError(f"{key}.source: {config.named} has no rows.\n{EXAMPLE}")
    return rows


def check_first_row(
    config: DataConfig, key: str = "data", columns: Callable[[DataConfig, str], Columns] = Columns
) -> None:
    """Read the first row of ``config.source``, no function, and check it.

    Raises:
        DataError: as :func:`load_rows`, for what the first row shows.
    """
    with source_named(config, key):
        row = next(_rows(config, key, columns(config, key)), None)
    if not row:
        raise DataError(f"{key}.source: {config.named} has no rows.\n{EXAMPLE}")


def records(config: DataConfig, key: str = "data") -> Iterator[tuple[str, Any]]:
    """Read the records that become rows, each with its place, without a check."""
    return islice(read(config, key), config.limit or None)


def _rows(config: DataConfig, key: str, mapping: Columns) -> Iterator[Row]:
    for index, (place, record) in enumerate(records(config, key)):
        yield row_of(record, index, place, mapping)


@contextmanager
def source_named(config: DataConfig, key: str) -> Iterator[None]:
    """Let what the block raises name the option that sets the source."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise DataError(
            f"{key}.source={config.named[:200]} cannot be read: {why}.\n"
            "  it may be:  a file or a folder that this user may read"
        ) from None

    except DataError as error:
        if f"{key}.source" in str(error):
            raise
        raise DataError(f"{error}\n  set by:  {key}.source={config.named[:200]}") from None


def fingerprint(rows: Iterable[Row]) -> str:
    """Hash the content and order of ``rows``: equal in every process, format and Python
    version.
    """
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(json.dumps(asdict(row), sort_keys=True).encode())
    return digest.hexdigest()


def row_of(record: Any, index: int, place: str, mapping: Columns) -> Row:
    """Make a row of a record, which is number ``index`` of its source.

    Raises:
        DataError: it is no mapping, lacks a column, or has one of a wrong type.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"{place} is a {type(record).__name__}, not a mapping of columns.")

    plain = {}
    for column, inner in record.items():
        try:
            name, value = _scalar(str(column), place), _plain(inner, place)
        except DataError as error:
            raise DataError(f"{error}\n  column:  {str(column)[:80]!a}") from None
        if value is not None:
            plain[name] = value

    if lacking := mapping.lacking(plain):
        raise DataError(f"{place} has no {lacking}")
    if mapping.conversations and (said := _conversation(plain, mapping)):
        name, found = said
        messages = _prompt(found, f"{place}: {name!r}")
        return Row(messages, "", index, mapping.others_of(plain))

    found = mapping.take(plain, "prompt")
    if found is None:
        raise DataError(f"{place} has no {mapping.missing('prompt', plain)}")
    prompt = _prompt(found, f"{place}: {mapping.source('prompt')!r}")
    return Row(prompt, _answer(plain, place, mapping), index, mapping.others_of(plain))


def _conversation(record: dict[str, Any], mapping: Columns) -> tuple[str, list[Any]] | None:
    """Return the column of a whole conversation with its name, or None.

    There is none where a row has a prompt and an answer.
    """
    has_answer = mapping.source("answer") and mapping.take(record, "answer") is not None
    if has_answer and mapping.take(record, "prompt") is not None:
        return None

    for name in ("messages", "prompt"):
        found = mapping.take(record, name)
        if isinstance(found, list):
            return mapping.source(name), found
    return None


def _prompt(value: Any, where: str) -> str | Messages:
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where} is empty.")
        return value

    if not isinstance(value, list):
        raise DataError(
            f"{where} is a {type(value).__name__}; it must be a string or a list of "
            "{role, content}."
        )
    if not value:
        raise DataError(f"{where} has no messages.")

    messages = tuple(_message(message, where) for message in value)
    if not any(message["content"].strip() for message in messages):
        raise DataError(f"{where} is empty.")
    return messages


def _message(message: Any, where: str) -> dict[str, Any]:
    """Check a message of a prompt. One that calls tools may have no content."""
    if isinstance(message, dict) and message.get("tool_calls"):
        message = {"content": "", **message}

    fits = isinstance(message, dict) and all(
        isinstance(message.get(k), str) for k in ("role", "content")
    )
    if not fits:
        raise DataError(
            f"{where} holds {message!r:.80}; each message needs a role and a content, both strings."
        )
    return message


def _answer(record: dict[str, Any], place: str, mapping: Columns) -> str:
    if not mapping.source("answer"):
        return ""

    answer = mapping.take(record, "answer")
    if answer is None:
        graded = None if mapping.answer_is_placed else record.get("reward_model")
        if not isinstance(graded, dict) or "ground_truth" not in graded:
            raise DataError(
                f"{place} has no {mapping.missing('answer', record)}\n"
                f"  none needed:  {mapping.key}.answer_key=''"
            )
        answer = graded["ground_truth"]
    return answer if isinstance(answer, str) else json.dumps(answer)


def _plain(value: Any, place: str, depth: int = 0) -> Any:
    """Return ``value`` as JSON knows it: no NumPy, tuples as lists, dates as text.

    NaN, with which tables mark what is missing, is null. Nulls of mappings are left
    out.
    """
    if depth > MAX_DEPTH:
        raise DataError(f"{place} is nested more than {MAX_DEPTH} levels deep.")
    match value:
        case None | bool() | int() | float() | str():
            return _scalar(value.item() if isinstance(value, np.generic) else value, place)
        case Mapping():
            inner = {_scalar(str(k), place): _plain(v, place, depth + 1) for k, v in value.items()}
            return {k: v for k, v in inner.items() if v is not None}
        case list() | tuple():
            return [_plain(v, place, depth + 1) for v in value]
        case np.ndarray() | np.generic():
            return _plain(value.tolist(), place, depth + 1)
        case date() | time() | Decimal():
            return str(value)

    raise DataError(
        f"{place} holds a {type(value).__name__}, which JSON cannot.\n  try:  text or numbers "
        "instead of it"
    )


def _scalar(value: Any, place: str) -> Any:
    """Return a text or a number that every process and every file takes.

    Raises:
        DataError: it is none.
    """
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{place} holds half of a surrogate pair (character {error.start}), which is no "
                "text.\n  try:  writing the file as UTF-8"
            ) from None

    if isinstance(value, float) and not isfinite(value):
        if isnan(value):
            return None
        raise DataError(f"{place} holds {value}, which JSON cannot.\n  try:  a finite number")
    if type(value) is int and abs(value) > MAX_INTEGER:
        raise DataError(
            f"{place} holds an integer of {value.bit_length()} bits.\n  try:  text instead of it"
        )
    return value
