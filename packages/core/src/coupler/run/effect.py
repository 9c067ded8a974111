"""Compare two configurations by their effect.

An option that cannot change a result makes no difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from coupler.config.options import REPLACED, SECTIONS, TRACKER, Options
from coupler.system.plain import to_plain
from coupler.system.tree import flatten, value_at

# Text that the command line takes without quotes.
PLAIN_TEXT = re.compile(r"[A-Za-z_./][\w./:-]*")
WORDS = ("null", "true", "false", "nan", "inf")
# The choice that a run may be without, and that follows from no other option.
PLAYED = "environment.name"


@dataclass(frozen=True, slots=True)
class Change:
    """An option that has another value than it had, and on which results depend."""

    key: str
    was: Any
    now: Any
    known: bool  # this release has such an option

    def __str__(self) -> str:
        ending = f"is {self.now}" if self.known else "this release has no such option"
        return f"{self.key} was {self.was}, {ending}"

    @property
    def undo(self) -> str:
        """Return the overrides that bring the old value back, as a shell takes them.

        The text is empty where the option is gone.
        """
        if not self.known:
            return ""

        section = self.key.removesuffix(".name")
        key = section if section in SECTIONS else self.key
        if SECTIONS.get(key, key) != key:
            key = f"{SECTIONS[key]}@{key}"

        texts = [f"{key}={_typed(self.was)}"]
        # A mapping adds its entries to those of the file.
        if isinstance(self.was, Mapping) and isinstance(self.now, Mapping) and self.was:
            texts = [f"{key}={{}}"] * bool(self.now.keys() - self.was.keys()) + texts
        return " ".join(f'"{text}"' if {*"' {"} & {*text} else text for text in texts)


def changes(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    options: Options,
    gone: Collection[str] | None = None,
) -> list[Change]:
    """List what differs in effect between two configurations, given as plain nested
    values.

    An option that one side does not name has today's default there.

    Args:
        options: those of the configuration that is ``new``.
        gone: keys of ``old`` whose values were not the defaults then, or None if nobody
            knows.
    """
    before, now = _by_option(old, options), _by_option(new, options)
    found = [*_of_options(before, now, options), *_of_unknown(before, now, options, gone)]

    # The options of a section that was chosen anew are no differences of their own.
    chosen_anew = [
        change.key.removesuffix("name")
        for change in found
        if change.key.removesuffix(".name") in SECTIONS
    ]
    return [
        change
        for change in found
        if change.key.endswith(".name") or not change.key.startswith(tuple(chosen_anew))
    ]


def _of_options(
    before: Mapping[str, Any], now: Mapping[str, Any], options: Options
) -> Iterator[Change]:
    if before.get(PLAYED) != now.get(PLAYED):
        yield Change(PLAYED, before.get(PLAYED), now.get(PLAYED), known=True)
    for key, option in options.table.items():
        default = to_plain(option.default)
        was, is_now = before.get(key, default), now.get(key, default)
        if option.affects_results and was != is_now and key != PLAYED:
            yield Change(key, was, is_now, known=True)


def _of_unknown(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    options: Options,
    gone: Collection[str] | None,
) -> Iterator[Change]:
    """Yield the values in ``before`` of options that this release does not have.

    Values that were defaults then are left out. So are the options of a section that is
    not chosen today, because that choice is a difference of its own, and those of
    trackers, which change no result.
    """
    unset = SECTIONS.keys() - options.sections.keys()
    without = tuple(f"{path}." for path in (TRACKER, *unset))
    for key in sorted(before.keys() - options.table.keys() - SECTIONS.keys() - REPLACED.keys()):
        had_default = gone is not None and key not in gone
        if not key.startswith(without) and not had_default and before[key] != now.get(key):
            yield Change(key, before[key], None, known=False)


def _by_option(values: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Return the values by full key.

    A mapping that is the value of one option stays whole.
    """
    inside = [
        f"{key}."
        for key, option in options.table.items()
        if isinstance(to_plain(option.default), dict)
    ]
    flat = {
        key: value for key, value in flatten(values).items() if not key.startswith(tuple(inside))
    }
    whole = {key[:-1]: value_at(values, key[:-1]) for key in inside}
    return flat | {key: value for key, value in whole.items() if value is not None}


def _typed(value: Any) -> str:
    """Write a value as the command line takes it."""
    if isinstance(value, Mapping):
        pairs = (f"{_typed(str(key))}:{_typed(inner)}" for key, inner in value.items())
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_typed, value)) + "]"
    if not isinstance(value, str):
        return json.dumps(value)

    if PLAIN_TEXT.fullmatch(value) and value.lower() not in WORDS:
        return value
    return "'" + value.replace("'", "\\'") + "'"
