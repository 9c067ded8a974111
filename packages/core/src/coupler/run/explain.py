"""Explain options: what they mean, where they are declared, and who set them."""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

from coupler.config.compose import Composed, plain
from coupler.config.options import SECTIONS, Option
from coupler.config.schema import RunConfig
from coupler.system.tree import value_at


def explain(composed: Composed, key: str) -> str:
    """Describe one option, or list the options of a section.

    Raises:
        ConfigError: there is no such key. The sentence names those that may be meant.
    """
    members = composed.options.members(key)
    if members:
        start = f"{key}." if key else ""
        inner = [o for o in composed.options.table.values() if o.key.startswith(start)]
        width = max(len(o.key) for o in inner)
        return "\n".join(f"{o.key:{width}}  {description(o)}".rstrip() for o in inner)

    option = composed.options.find(key)
    value = value_of(composed, key)
    lines = [
        key,
        f"  {description(option)}",
        f"  takes:     {option.takes}",
        f"  default:   {_shown(option.default)}",
        f"  value:     {_shown(value)}  ({composed.origin.get(key, 'default')})",
        f"  declared:  {option.owner.__module__}:{option.owner.__qualname__}",
    ]
    return "\n".join(line for line in lines if line.strip())


def differences(composed: Composed) -> str:
    """List the options whose values are not the defaults, with who set them."""
    lines = []
    for key, option in composed.options.table.items():
        value, default = value_of(composed, key), _shown(option.default)
        if _shown(value) != default:
            entries = [o for k, o in composed.origin.items() if k == key or k.startswith(f"{key}.")]
            lines.append(
                f"{key}: {_shown(value)}  # default {default}; "
                f"{entries[0] if entries else 'plugin'}"
            )
    return "\n".join(lines)


def way_to_options() -> str:
    """Return the end of a command's help, which lists sections and how to ask on."""
    chosen = [path for path in SECTIONS if "." not in path]
    sections = [name for name, value in vars(RunConfig()).items() if is_dataclass(value)]
    others = [name for name in vars(RunConfig()) if name not in (*chosen, *sections)]
    listed = (
        ("sections", sections),
        ("sections of the chosen backends", chosen),
        ("options without a section", others),
    )
    wrapped = [
        textwrap.fill(f"{what}: {', '.join(names)}", 88, subsequent_indent="  ")
        for what, names in listed
    ]
    written = "every option is written key=value, in any order:  "
    lines = (
        written + "steps=50 sampling.max_tokens=512 engine=NAME",
        *wrapped,
        "",
        "what options mean, their defaults, and what they take:",
        "  coupler config explain                      every option",
        "  coupler config explain sampling             the options of a section",
        "  coupler config explain engine engine=NAME   the options of a backend; names: "
        "coupler plugins",
    )
    return "\n".join(lines)


def description(option: Option) -> str:
    """Return the text under the field, or the comment on its line, from the source of
    its dataclass or of one it extends.

    An option without either takes the first line of its type's docstring.
    """
    name = option.key.rpartition(".")[2]
    for owner in option.owner.__mro__:
        declared = name in inspect.get_annotations(owner)
        if declared and (text := _described(textwrap.dedent(inspect.getsource(owner)), name)):
            return text
    named = isinstance(option.type, type) and issubclass(option.type, Enum)
    return (vars(option.type).get("__doc__") or "").partition("\n")[0] if named else ""


def value_of(composed: Composed, key: str) -> Any:
    """Return the plain value of an option, or None for an entry of a mapping that is
    not set.
    """
    return value_at(plain(composed.config), key)


def _described(source: str, name: str) -> str:
    body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
    at = next(i for i, n in enumerate(body) if isinstance(n, ast.AnnAssign) and n.target.id == name)  # type: ignore
    under = body[at + 1] if at + 1 < len(body) else None
    if isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant):
        return " ".join(str(under.value.value).split())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.start[0] == body[at].end_lineno:
            return token.string.lstrip("# ")
    return ""


def _shown(value: Any) -> str:
    return "null" if value is None else str(value) or "''"
