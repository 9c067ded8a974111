"""Look at the columns of rows: their types, and those that lie in the wrong place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from textwrap import shorten
from typing import Any

from coupler.data.columns import ALSO
from coupler.data.options import DataConfig
from coupler.doctor.spotted import Spotted
from coupler.plugins.finding import Finding, ok, warning

# Columns that a run reads.
KNOWN = ("prompt", "answer", "data_source", "tools", "tools_kwargs", "reward_model")
# Names by which verl gives a tool its arguments.
OF_KWARGS = {"create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs"}
NAMES = {str: "text", bool: "true or false", int: "integer", float: "number", list: "list"}
MAX_COLUMNS = 40


@dataclass(slots=True)
class Seen:
    """The columns of all records: their types, and the first place of each."""

    total: int = 0
    types: dict[str, Counter[str]] = field(default_factory=dict)
    first: dict[tuple[str, str], str] = field(default_factory=dict)
    misplaced: dict[str, Spotted] = field(default_factory=dict)

    def add(self, place: str, record: Any) -> None:
        """Count the columns of a record, whatever it is."""
        self.total += 1
        if not isinstance(record, Mapping):
            return

        for column, value in record.items():
            if value is None:
                continue
            name, kind = str(column), _kind(value)
            self.types.setdefault(name, Counter())[kind] += 1
            self.first.setdefault((name, kind), place)

    def judge(self, place: str, columns: Mapping[str, Any]) -> None:
        """Look for columns in the wrong place, under the names that a run reads."""
        for what in _misplaced(columns):
            example = shorten(repr(dict(columns)), 80, placeholder="...")
            self.misplaced.setdefault(what, Spotted()).add(place, example)

    def count(self, name: str) -> int:
        """Return the number of rows that have a column."""
        return self.types[name].total() if name in self.types else 0


def column_findings(
    key: str, config: DataConfig, seen: Seen, needed: tuple[str, ...] = ()
) -> Iterator[Finding]:
    """Yield the list of columns, and one warning for each that looks misplaced.

    Args:
        needed: columns that the run reads in place of an answer.
    """
    if seen.types:
        listed = [_described(name, seen) for name in list(seen.types)[:MAX_COLUMNS]]
        yield ok(key, f"columns: {'; '.join(listed)}")
    yield from _other_names(key, config, seen, needed)
    for what, places in seen.misplaced.items():
        yield from places.warnings(key, seen.total, what)

    answer = _column(config, "answer")
    for kind, count in seen.types.get(answer, Counter()).items():
        if kind == "text":
            continue
        yield warning(
            key,
            f"answers that are no text but {kind}: {count} of {seen.total} rows; the reward gets "
            f"them as JSON; the first is {seen.first[answer, kind]}",
        )


def _column(config: DataConfig, name: str) -> str:
    """Return the column of the source that becomes ``name``."""
    return config.columns.get(name, getattr(config, f"{name}_key", name))


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "mapping"
    return NAMES.get(type(value), "other")


def _described(name: str, seen: Seen) -> str:
    kinds = seen.types[name]
    types = " or ".join(kind for kind, _ in kinds.most_common())
    if kinds.total() < seen.total:
        return f"{name} {types} in {kinds.total()}"
    return f"{name} {types}"


def _other_names(
    key: str, config: DataConfig, seen: Seen, needed: tuple[str, ...]
) -> Iterator[Finding]:
    """Find columns whose names look like those that a run reads."""
    used = {_column(config, name) for name in (*KNOWN, *needed)}
    used.update(column.partition(".")[0] for column in config.columns.values())

    for name in config.columns.keys() - {*KNOWN, *needed}:
        if meant := _meant(name):
            yield warning(
                key,
                f"{key}.columns.{name} makes a column {name!r}, which only a reward or an "
                f"environment reads: {key}.columns.{meant} may be meant",
            )

    for name in seen.types:
        meant = _meant(name)
        if name in used or not meant or (needed and meant == "answer"):
            continue
        wanted = _column(config, meant)
        if seen.count(wanted):
            continue
        yield warning(
            key,
            f"no row has {wanted!r}, and {name!r} may be meant ({seen.count(name)} rows): "
            f"{key}.columns.{meant}={name}",
        )


def _meant(name: str) -> str:
    """Return the column that a run reads and ``name`` looks like, or nothing."""
    close = get_close_matches(name, KNOWN, n=1, cutoff=0.8)
    usual = [known for known, others in ALSO.items() if name in others]
    return next(iter([*close, *usual]), "")


def _misplaced(record: Mapping[str, Any]) -> Iterator[str]:
    """Say of tools and of their arguments where they do not belong."""
    tools = record.get("tools")
    if isinstance(tools, Mapping) or _holds_kwargs(tools):
        yield "arguments of tools under 'tools', which is for schemas and not for tools_kwargs"

    elif isinstance(tools, str):
        yield "'tools' as text, where a list of schemas is shown by the chat template"

    kwargs = record.get("tools_kwargs")
    if isinstance(kwargs, list) or _is_schema(kwargs):
        yield "schemas under 'tools_kwargs', which is for arguments by tool and not for tools"
    elif kwargs and not _maps_tools(kwargs):
        yield "'tools_kwargs' that map no tools to arguments"

    extra = record.get("extra_info")
    if not isinstance(extra, Mapping) or kwargs:
        return
    if extra.get("tools_kwargs"):
        yield (
            "'tools_kwargs' inside extra_info, where no tool finds them "
            "(data.columns.tools_kwargs=extra_info.tools_kwargs)"
        )
    elif extra.get("need_tools_kwargs"):
        yield "'need_tools_kwargs' without any"


def _is_schema(value: Any) -> bool:
    return isinstance(value, Mapping) and "function" in value and "type" in value


def _maps_tools(kwargs: Any) -> bool:
    if not isinstance(kwargs, Mapping):
        return False
    return all(isinstance(given, Mapping) for given in kwargs.values())


def _holds_kwargs(tools: Any) -> bool:
    if not isinstance(tools, list):
        return False
    return any(isinstance(tool, Mapping) and OF_KWARGS & tool.keys() for tool in tools)
