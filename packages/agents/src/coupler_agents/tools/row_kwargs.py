"""Read the arguments that a row gives to tools: its column ``tools_kwargs``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from coupler.errors import DataError
from coupler_agents.tools.schema import hidden_of

Schema = Mapping[str, Any]
COLUMN = "tools_kwargs"
# each key of a tool, and the method of its object that takes the arguments
METHODS = {
    "create_kwargs": "reset",
    "execute_kwargs": "__call__",
    "calc_reward_kwargs": "get_reward",
    "release_kwargs": "release",
}


@dataclass(frozen=True)
class Given:
    """The arguments that a row gives to one tool, by the keys of verl."""

    create_kwargs: Mapping[str, Any] = field(default_factory=dict)
    execute_kwargs: Mapping[str, Any] = field(default_factory=dict)
    calc_reward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    release_kwargs: Mapping[str, Any] = field(default_factory=dict)


def given_by(
    row: Mapping[str, Any],
    tools: Mapping[str, Callable[..., Any]],
    classes: Mapping[str, type],
    builtin: Collection[str] = (),
) -> dict[str, Given]:
    """Return what a row gives to each tool that it names.

    A value that is null counts as absent, since a table has it where only other rows
    name a tool.

    Args:
        tools: what is called, by the name of the tool.
        classes: those tools of which an episode has an object.
        builtin: those tools of this package that read their ``create_kwargs``.

    Raises:
        DataError: a tool or an argument is not there, or an object needs one more.
    """
    _check_tools_column(row, tools)
    read = {
        name: _read(name, value, tools) for name, value in _object(row.get(COLUMN), COLUMN).items()
    }

    for name, given in read.items():
        _check_call(name, given.execute_kwargs, tools[name])
        if name not in classes and name not in builtin:
            _check_function(name, given)
    for name, made in classes.items():
        _check_object(name, made, read.get(name, Given()))
    return read


def python_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a row gives to the tool ``python``.

    Raises:
        DataError: it is no object.
    """
    given = _object(row.get(COLUMN), COLUMN)
    return _object(given.get("python"), f"{COLUMN}.python")


def _read(name: str, value: Any, tools: Mapping[str, Any]) -> Given:
    if name not in tools:
        raise DataError(
            f"the row's column {COLUMN} names the tool {name!r}, and there is none.\n"
            f"  there are:  {', '.join(tools) or 'no tools'}"
        )

    found = _object(value, f"{COLUMN}.{name}")
    known = [each.name for each in fields(Given)]
    for key in found:
        if key not in known:
            raise DataError(
                f"the row's column {COLUMN} has {name}.{key}, which nothing reads.\n"
                f"  known:  {', '.join(known)}"
            )
    return Given(**{key: _object(v, f"{COLUMN}.{name}.{key}") for key, v in found.items()})


def _object(value: Any, where: str) -> dict[str, Any]:
    """Return an object without its nulls."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"the row's {where} is a {type(value).__name__}, and no object.")
    return {key: each for key, each in value.items() if each is not None}


def _check_call(name: str, given: Mapping[str, Any], tool: Callable[..., Any]) -> None:
    hidden = hidden_of(tool)
    if foreign := given.keys() - hidden:
        raise DataError(
            f"the row's {COLUMN}.{name}.execute_kwargs has {', '.join(sorted(foreign))}, which "
            f"the tool {name} does not take from a row.\n"
            f"  it takes:  {', '.join(sorted(hidden)) or 'no keyword-only argument'}"
        )


def _check_function(name: str, given: Given) -> None:
    for key in METHODS:
        if key != "execute_kwargs" and getattr(given, key):
            raise DataError(
                f"the row's {COLUMN}.{name}.{key} is for a tool that is a class, and {name} is "
                "none.\n"
                f"  do:  write it as a class with __call__ and {METHODS[key]}, or drop {key}"
            )


def _check_object(name: str, made: type, given: Given) -> None:
    for key, method in METHODS.items():
        kwargs = getattr(given, key)
        called = getattr(made, method, None)

        if key == "execute_kwargs" or (called is None and not kwargs):
            continue
        if called is None:
            raise DataError(
                f"the row's {COLUMN}.{name}.{key} is for a method {method}, and the class "
                f"{name} has none."
            )
        try:
            inspect.signature(called).bind(made, **kwargs)
        except TypeError as error:
            raise DataError(
                f"the row's {COLUMN}.{name}.{key} does not fit {name}.{method}: {error}."
            ) from None


def offered(row: Mapping[str, Any], schemas: Sequence[Schema]) -> list[Schema]:
    """Return the tools that a row offers: those that its column ``tools`` names, or
    all.

    Raises:
        DataError: it names one that is not there, or is no list of tools.
    """
    found = row.get("tools")
    if found is None:
        return list(schemas)
    by_name = {schema["function"]["name"]: schema for schema in schemas}
    if not isinstance(found, list):
        raise DataError(f"the row's column tools is a {type(found).__name__}, and no list.")

    names = [_name_of(each) for each in found]
    if unknown := [name for name in names if name not in by_name]:
        raise DataError(
            f"the row's column tools names {unknown[0]!r:.80}, and there is no such tool.\n"
            f"  there are:  {', '.join(by_name) or 'no tools'}"
        )
    return [by_name[name] for name in dict.fromkeys(names)]


def _name_of(tool: Any) -> Any:
    """Return the name of a tool, which may be itself, or in an OpenAI schema."""
    if not isinstance(tool, Mapping):
        return str(tool)
    function = tool.get("function")
    return function.get("name") if isinstance(function, Mapping) else tool.get("name")


def _check_tools_column(row: Mapping[str, Any], tools: Mapping[str, Any]) -> None:
    """Refuse arguments in the column ``tools``, which is for schemas.

    Raises:
        DataError: the column holds arguments.
    """
    found = row.get("tools")
    if isinstance(found, Mapping) and (named := found.keys() & tools.keys()):
        raise DataError(
            f"the row's column tools has arguments of {', '.join(sorted(named))}, which nothing "
            f"reads.\n  do:  name the column {COLUMN}"
        )
