"""What users and plugins rely on: the public names of core, and every option with its
default.

``python tests/test_public.py`` writes the two lists anew. A changed default belongs
into CHANGELOG.md; a name that a plugin calls or implements differently raises
``coupler.API``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import coupler
from coupler.config.options import Options
from coupler.plugins import Backend
from coupler.plugins.manager import Plugins
from coupler.run.explain import description
from coupler.system.plain import to_plain

LISTS = Path(__file__).parent / "public"
KINDS = ("engine", "rollout", "algorithm")
# a plugin of somebody else that is installed beside ours is not listed
OURS = "coupler-"


def backends() -> Iterator[tuple[str, Backend]]:
    plugins = Plugins.load()
    for kind in KINDS:
        for name, backend in sorted(plugins.of(kind).items()):
            if plugins.owner[kind, name].distribution.startswith(OURS):
                yield kind, backend


def options() -> Iterator[str]:
    """Every option of core and of our backends, with its default."""
    for option in Options({}).table.values():
        yield f"{option.key} = {to_plain(option.default)!r}"
    for kind, backend in backends():
        for option in Options({kind: backend.config}).table.values():
            if option.key.startswith(f"{kind}."):
                yield f"{kind}={backend.name}  {option.key} = {to_plain(option.default)!r}"


def names() -> Iterator[str]:
    """Every public name of core: fields of records, members of enums, signatures of
    methods.
    """
    for name in coupler.__all__:
        thing = getattr(coupler, name)
        if not isinstance(thing, type):
            yield f"{name}: {thing if isinstance(thing, int) else type(thing).__name__}"
            continue
        bases = ", ".join(base.__name__ for base in thing.__bases__ if base is not object)
        yield f"{name}({bases})"
        yield from (f"{name}.{line}" for line in members(thing))


def members(thing: type) -> Iterator[str]:
    listed = {f.name for f in fields(thing)} if is_dataclass(thing) else set()
    for field in fields(thing) if is_dataclass(thing) else ():
        optional = field.default is not MISSING or field.default_factory is not MISSING
        yield f"{field.name}: {field.type}{' = ...' if optional else ''}"
    for name, value in vars(thing).items():
        if name.startswith("_") or name in listed:
            continue
        value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if inspect.isfunction(value):
            yield f"{'async ' * inspect.iscoroutinefunction(value)}{name}{inspect.signature(value)}"
        else:
            yield name


@pytest.mark.parametrize("listed", [names, options])
def test_the_public_list_is_what_there_is(listed: Any) -> None:
    known, now = (LISTS / f"{listed.__name__}.txt").read_text().splitlines(), list(listed())
    gone, new = sorted(set(known) - set(now)), sorted(set(now) - set(known))
    assert (gone, new) == ([], []), (
        "if you mean it: python tests/test_public.py, CHANGELOG.md, and coupler.API"
    )


def test_every_option_is_described() -> None:
    tables = [
        Options({}).table,
        *(Options({kind: backend.config}).table for kind, backend in backends()),
    ]
    assert not sorted(
        {key for table in tables for key, option in table.items() if not description(option)}
    )


if __name__ == "__main__":
    LISTS.mkdir(exist_ok=True)
    for listed in (names, options):
        (LISTS / f"{listed.__name__}.txt").write_text("\n".join(listed()) + "\n")
