"""List the options of a run in a flat table, and find unknown keys and wrong types."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, make_dataclass
from enum import Enum
from functools import cache, reduce
from math import isfinite
from typing import Any, get_args, get_origin, get_type_hints

from coupler.config.schema import RunConfig
from coupler.errors import ConfigError
from coupler.system.plain_values import holds_text, is_of, shown
from coupler.system.words import closest

# Sections whose options come from the selected plugin, and its kind.
SECTIONS = {
    "engine": "engine",
    "rollout": "rollout",
    "algorithm": "algorithm",
    "environment": "environment",
    "critic.engine": "engine",
    "eval.rollout": "rollout",
    "teacher.engine": "engine",
    "reward_model.engine": "engine",
    "judge.rollout": "rollout",
}
# The section that has a section for each tracker with options.
TRACKER = "tracker"
# Entries of a list, for messages.
EXAMPLES = {str: "first,second", int: "1,2", float: "0.5,1", bool: "true,false"}
TYPE_NAMES = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "text"}


REPLACED = {  # options of earlier releases, and what to write instead
    "checkpoint.optimizer": "checkpoint.contents=[model,extra] for false; true is the default"
}


@dataclass(frozen=True, slots=True)
class Option:
    """One key that users can set."""

    key: str  # in full, for example "engine.lr"
    type: Any
    default: Any
    owner: type  # the dataclass it is a field of
    affects_results: bool = True  # see coupler.interfaces.no_effect
    words: str = ""  # for what it takes, where its type does not say that

    @property
    def takes(self) -> str:
        """Say in words what values the option has."""
        return self.words or _in_words(self.type)


class Options:
    """Every option of a run whose :data:`SECTIONS` have these config classes."""

    def __init__(self, sections: Mapping[str, type]) -> None:
        self.sections = dict(sections)
        self.table = {option.key: option for option in self._walk(RunConfig, "")}

    def members(self, section: str) -> list[str]:
        """Return the names under a section. The top level is the empty text."""
        start = f"{section}." if section else ""
        return list(
            dict.fromkeys(k[len(start) :].split(".")[0] for k in self.table if k.startswith(start))
        )

    def find(self, key: str) -> Option:
        """Return the option ``key``, or the one whose entry it is
        (``rollout.extra_args.x``).

        Raises:
            ConfigError: there is none. The sentence names those that may be meant.
        """
        path = key

        while path:
            option = self.table.get(path)
            if option is not None and (path == key or _is_open(option.type)):
                return option
            if option is not None:
                raise ConfigError(
                    f"unknown option {key}: {path} takes {option.takes} and has no options of "
                    "its own."
                )
            path = path.rpartition(".")[0]

        raise ConfigError(self._unknown(key))

    def conform(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``values`` with enum members instead of their texts.

        Raises:
            ConfigError: a key is unknown, or no member is called so.
        """
        return {key: self._conform(key, value) for key, value in values.items()}

    def _conform(self, key: str, value: Any) -> Any:
        if self.members(key):  # a section
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{key} is a section, got {value!r}.\n  its options:  "
                    f"{', '.join(self.members(key))}"
                )
            return {
                str(name): self._conform(f"{key}.{name}", inner) for name, inner in value.items()
            }

        option = self.find(key)
        kind = _enum_in(option.type)
        if isinstance(value, bool) and kind and str(value).lower() in {*kind}:
            value = str(value).lower()
        _check(option, value)
        if kind is None or not isinstance(value, str) or value.startswith("${"):
            return value
        for member in kind:
            if value.lower() in (str(member.value).lower(), member.name.lower()):
                return member
        raise ConfigError(wrong_value(option, value))

    def _unknown(self, key: str) -> str:
        if key in REPLACED:
            return f"the option {key} was replaced.\n  write it as:  {REPLACED[key]}"
        first, _, name = ".".join(key.split(".")[:2]).partition(".")
        if first == TRACKER and not self.members(f"{TRACKER}.{name}"):
            name = name or "NAME"
            return (
                f"the options of {TRACKER}.{name} are known where trackers has it, if it has any.\n"
                f"  try:  trackers=[console,jsonl,{name}]"
            )
        for path in SECTIONS.keys() - self.sections.keys():
            if f"{key}.".startswith(f"{path}."):
                return f"the options of {path} are known once one is chosen.\n  try:  {path}=NAME"

        section = key
        while section and not self.members(section):
            section = section.rpartition(".")[0]
        start, names = (f"{section}." if section else ""), self.members(section)
        names += [path[len(start) :] for path in SECTIONS if path.rpartition(".")[0] == section]
        names = list(dict.fromkeys(names))

        wanted = key[len(start) :].split(".")[0]
        close = [start + name for name in closest(wanted, names, n=2)]
        if not close:
            close = [k for k in self.table if k.split(".")[-1] == key.split(".")[-1]][:3]

        lines = [f"unknown option {key}."]
        lines += [f"  did you mean:  {', '.join(close)}"] if close else []
        lines.append(f"  options of {section or 'a run'}:  {', '.join(names)}")
        if "extra_args" in names:
            lines.append(f"  options of the backend's own go under:  {start}extra_args.{wanted}")
        return "\n".join(lines)

    def _walk(self, owner: type, start: str, affects: bool = True) -> Iterator[Option]:
        hints = get_type_hints(owner)
        for each in fields(owner):
            key = start + each.name
            matters = affects and each.metadata.get("affects_results", True)
            chosen = key in SECTIONS or key == TRACKER
            inner = self.sections.get(key) if chosen else hints[each.name]
            if is_dataclass(inner):
                yield from self._walk(inner, f"{key}.", matters)  # type: ignore[arg-type]
            elif inner is not None:
                words = each.metadata.get("takes", "")
                yield Option(key, inner, default_of(each), owner, matters, words)


def tracker_sections(configs: Mapping[str, type]) -> dict[str, type]:
    """Return the section of the options of trackers, by whose names it has sections.

    A tracker whose configuration class has its name alone has no options, and neither
    has one whose name is no identifier of Python.
    """
    own = {n: c for n, c in configs.items() if len(fields(c)) > 1 and n.isidentifier()}
    return {TRACKER: _section_of(*own.items())} if own else {}


@cache
def _section_of(*own: tuple[str, type]) -> type:
    """Make one class for the same trackers, so that equal configurations are equal."""
    return make_dataclass("TrackerOptions", [(n, c, field(default_factory=c)) for n, c in own])


def drop_replaced(values: dict[str, Any]) -> None:
    """Take options of earlier releases out of the configuration that a run wrote."""
    for key in REPLACED:
        start, _, name = key.rpartition(".")
        if isinstance(inner := values.get(start), dict):
            inner.pop(name, None)


def section(config: RunConfig, path: str) -> Any:
    """Return the section of a plugin, such as ``critic.engine``, or None where nothing
    is chosen.
    """
    return reduce(getattr, path.split("."), config)


def in_full(complaint: str, path: str) -> str:
    """Replace the keys in a complaint of a backend's configuration (``engine.lr``) by
    the keys that users write.

    Example:
        ``in_full("engine.lr must be above 0.", "critic.engine")`` is
        ``"critic.engine.lr must be above 0."``
    """
    return re.sub(rf"(?<![\w.]){path.rpartition('.')[2]}\.(?=\w)", f"{path}.", complaint)


def default_of(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default


def wrong_value(option: Option, value: Any) -> str:
    return f"{option.key} takes {option.takes}, got {shown(value)}."


def _check(option: Option, value: Any) -> None:
    """Refuse what is of another type. OmegaConf lets some of it pass.

    What an interpolation gives is known later.
    """
    if "${" in str(value) or is_of(option.type, value):
        return

    fix, kind = "", get_args(option.type)[0] if get_origin(option.type) is list else None
    if not holds_text(value):
        fix = "\n  try:  text without NUL and without bytes that are not UTF-8"
    elif option.type is str and isinstance(value, bool):
        fix = f"\n  write it as:  \"{option.key}='{str(value).lower()}'\", if a text is meant"
    elif kind in EXAMPLES:
        example = ",".join(map(str, option.default)) or EXAMPLES[kind]
        fix = f"\n  write it as:  {option.key}=[{example}]"
    if type(value) is float and not isfinite(value):
        raise ConfigError(f"{option.key} must be a finite number, got {value}.")
    raise ConfigError(wrong_value(option, value) + fix)


def _is_open(kind: Any) -> bool:
    return kind is dict or get_origin(kind) is dict


def _enum_in(kind: Any) -> type[Enum] | None:
    found = [k for k in (kind, *get_args(kind)) if isinstance(k, type) and issubclass(k, Enum)]
    return found[0] if found and get_origin(kind) not in (list, dict) else None


def _in_words(kind: Any) -> str:
    enum = _enum_in(kind)
    if enum is not None:
        return "one of " + ", ".join(str(member.value) for member in enum)

    if get_origin(kind) is list:
        entry = _in_words(get_args(kind)[0])
        return f"a list [...] of {entry.removeprefix('an ').removeprefix('a ')}"
    if _is_open(kind):
        return "a mapping {key: value, ...}"
    if type(None) in get_args(kind):
        others = " or ".join(_in_words(k) for k in get_args(kind) if k is not type(None))
        return f"{others}, or null"
    return TYPE_NAMES.get(getattr(kind, "__name__", ""), "any value")
