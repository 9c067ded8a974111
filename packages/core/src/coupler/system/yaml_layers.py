"""Read a YAML file of options together with those that its ``defaults`` list names.

The list has Hydra's meaning. ``base`` is the file ``base.yaml`` beside this one, and
``engine: fast`` is ``engine/fast.yaml``, whose options go below ``engine``. Where there
is no such file, it chooses a backend or a preset, as on the command line. Later entries
win. The file's own values come last, unless ``_self_`` says where they come.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coupler.errors import ConfigError, CouplerError
from coupler.system.beside import beside
from coupler.system.plain_values import holds_text, shown
from coupler.system.tree import flatten, merge, nest
from coupler.system.yaml_file import parse_yaml, read_yaml

DEFAULTS, SELF, PRESET = "defaults", "_self_", "preset"
MAX_FILES = 100
MAX_PATH = 4096
GROUP = re.compile(r"(?P<group>\w+(?:/\w+)*)(?:@(?P<section>\w+(?:\.\w+)*))?")
FORM = (
    "a list of FILE, GROUP: NAME and _self_, such as\n"
    "          defaults: [base, {engine: NAME}, _self_]"
)


@dataclass(frozen=True, slots=True)
class Layers:
    """Options of several files.

    Attributes:
        values: nested, those of later files over those of earlier ones.
        origin: the file of each value, by its full key, or ``preset NAME``.
    """

    values: dict[str, Any]
    origin: dict[str, str]

    @contextmanager
    def named(self) -> Iterator[None]:
        """Add the file to a complaint about a key, where there are several files."""
        try:
            yield
        except ConfigError as error:
            first = str(error).partition("\n")[0]
            known = sorted(self.origin, key=len, reverse=True)
            keys = (key for key in known if re.search(rf"(?<![\w.]){re.escape(key)}\b", first))
            key = next(keys, None)
            if key is None or len({*self.origin.values()}) == 1:
                raise
            raise ConfigError(f"{error}\n  in:  {self.origin[key]}") from None


@dataclass(slots=True)
class Reader:
    """Reads the files of one configuration.

    Attributes:
        sections: those for which an entry may choose a backend.
        place: turns a full key and its value in a file into those that are meant.
        preset: returns the text of a preset of plugins.
    """

    sections: Collection[str]
    place: Callable[[str, Any], tuple[str, Any]]
    preset: Callable[[str], str]
    _seen: set[tuple[str, str]] = field(default_factory=set)
    _read: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    def read(self, path: str | None, preset: Any = None) -> Layers:
        """Read a preset, and over it a file.

        Raises:
            ConfigError: one of them, or a file that they name, is missing or wrong.
        """
        if preset is not None:
            self._add_preset("the command line", preset)
        if path is not None:
            self._add(*_of_file(path), path, "")

        values: dict[str, Any] = {}
        origin: dict[str, str] = {}
        for layer, source in self._read:
            values = merge(values, layer)
            origin |= dict.fromkeys(flatten(layer), source)
        return Layers(values, origin)

    def _add(self, own: dict[str, Any], folder: Path | None, source: str, section: str) -> None:
        """Add the options of one file, and those of the files that it names."""
        if (source, section) in self._seen or len(self._seen) == MAX_FILES:
            why = f"name more than {MAX_FILES} files" if len(self._seen) == MAX_FILES else ""
            raise ConfigError(
                f"{source}: {DEFAULTS} {why or 'name this file twice, or lead back to it'}.\n"
                "  try:  each file once, and none that names the file it is named by"
            )
        self._seen.add((source, section))

        entries = _entries(own.pop(DEFAULTS, []), source)
        given = [self.place(_below(section, str(key)), value) for key, value in own.items()]
        values = nest(given)
        for group, name in entries if ("", SELF) in entries else [*entries, ("", SELF)]:
            if (group, name) == ("", SELF):
                moved = values if folder is None else beside(values, Path(source))
                self._read.append((moved, source))
            else:
                self._add_entry(group, name, folder, source, section)

    def _add_entry(
        self, group: str, name: str, folder: Path | None, source: str, section: str
    ) -> None:
        """Add what an entry of ``defaults`` names: a file, a preset or a backend."""
        kind, _, at = group.partition("@")
        below = _below(section, at or kind.replace("/", "."))
        path = (folder or Path()) / kind / f"{name.removesuffix('.yaml')}.yaml"

        if folder is not None and os.path.isfile(path):
            self._add(*_of_file(str(path)), str(path), below)
        elif group == PRESET:
            self._add_preset(source, name)
        elif group and below in self.sections:
            self._read.append((nest([(f"{below}.name", name)]), source))
        else:
            entry = f"{group}: {name}" if group else name
            fix = f"the file {path}" if folder else "GROUP: NAME of a backend or a preset"
            raise ConfigError(
                f"{source}: {DEFAULTS} names {entry}, and there is none.\n  try:  {fix}"
            )

    def _add_preset(self, source: str, name: Any) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{source}: {PRESET} takes the name of a preset, got {name!r}.")
        called = f"{PRESET} {name}"
        own = _mapping(parse_yaml(self.preset(name), Path(called)), called)
        self._add(own, None, called, "")


def _of_file(path: str) -> tuple[dict[str, Any], Path]:
    """Return the options of a file, and its folder."""
    if not holds_text(path) or not path.strip():
        raise ConfigError(f"--config={shown(path)} names no file.\n  try:  --config FILE.yaml")
    if len(path) > MAX_PATH or not os.path.lexists(path):
        raise ConfigError(
            f"there is no configuration file {path[:200]}.\n  it is looked up from:  {Path.cwd()}"
        )

    try:
        values = read_yaml(Path(path))
    except CouplerError as error:
        raise ConfigError(f"{error}\n  try:  a YAML file of options, such as  steps: 50") from None
    return _mapping(values, path), Path(path).parent


def _mapping(values: Any, source: str) -> dict[str, Any]:
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{source} is a {type(values).__name__}, but a configuration is a mapping of options "
            "to values.\n  try:  a line for each option, such as  steps: 50"
        )
    return dict(values)


def _entries(entries: Any, source: str) -> list[tuple[str, str]]:
    """Return group and name of each entry of ``defaults``. A file has no group."""
    if not isinstance(entries, list):
        raise ConfigError(f"{source}: {DEFAULTS} is {entries!r}.\n  try:  {FORM}")
    pairs = [_entry(each, source) for each in entries]
    if twice := [name for group, name in pairs if pairs.count((group, name)) > 1]:
        raise ConfigError(f"{source}: {DEFAULTS} names {twice[0]} twice.\n  try:  it once")
    return pairs


def _entry(entry: Any, source: str) -> tuple[str, str]:
    pair = ("", entry)
    if isinstance(entry, Mapping) and len(entry) == 1:
        pair = next(iter(entry.items()))
    group, name = pair
    is_named = isinstance(name, str) and holds_text(name) and name.strip()
    if not is_named or not (group == "" or GROUP.fullmatch(str(group))):
        raise ConfigError(f"{source}: {DEFAULTS} has the entry {entry!r}.\n  try:  {FORM}")
    return str(group), name


def _below(section: str, key: str) -> str:
    return f"{section}.{key}" if section and key else section or key
