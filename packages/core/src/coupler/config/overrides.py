"""Read the user's options, from the command line and from a YAML file, as plain
nested mappings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from coupler.config.options import SECTIONS
from coupler.errors import ConfigError
from coupler.system.plain_values import holds_text
from coupler.system.yaml_layers import Layers, Reader

# The longest override. Longer ones take the parser of Hydra seconds.
MAX_OVERRIDE = 4096


def parse_overrides(overrides: list[str]) -> list[tuple[str, Any]]:
    """Read ``key=value`` arguments in Hydra's grammar.

    A leading ``+`` or ``++`` has no effect, because no key can be added.

    Raises:
        ConfigError: one cannot be read, holds several values, or deletes.
    """
    parser = OverridesParser.create()
    return [_named(*_parse(parser, text)) for text in overrides]


def read_file(path: str) -> dict[str, Any]:
    """Read a YAML file of options, and those that it names. Interpolations stay, and
    :func:`beside` finds paths.
    """
    return read_files(path).values


def read_files(path: str | None, preset: Any = None, text_of: Callable[[str], str] = str) -> Layers:
    """Read a preset, whose text ``text_of`` returns, and a file over it.

    Raises:
        ConfigError: there is none, or it is no YAML mapping.
    """
    return Reader(SECTIONS, _named, text_of).read(path, preset)


def _named(key: str, value: Any) -> tuple[str, Any]:
    """Read ``engine=x`` as ``engine.name=x``."""
    return (f"{key}.name", value) if key in SECTIONS and isinstance(value, str) else (key, value)


def _parse(parser: OverridesParser, text: str) -> tuple[str, Any]:
    if not holds_text(text) or len(text) > MAX_OVERRIDE:
        key = ascii(text.partition("=")[0][:80]).strip("'")
        raise ConfigError(
            f"the value of {key} has NUL, bytes that are not UTF-8, or more than {MAX_OVERRIDE} "
            "characters.\n  try:  a shorter text without them, or a file:  --config FILE.yaml"
        )

    key, equals, value = text.partition("=")
    key = key.lstrip("+").strip()
    if text.startswith("~"):
        raise ConfigError(
            f"{text!r}: options cannot be deleted.\n  try:  set {key.lstrip('~')} to its default"
        )
    if not equals or not key:
        way = "write it as:  key=value, for example engine.lr=1e-6"
        way = f"try:  --config {text}" if text.endswith((".yaml", ".yml")) else way
        raise ConfigError(f"{text!r} is no override.\n  {way}")

    try:
        override = parser.parse_override(f"{key}={value}")
    except (HydraException, ValueError, RecursionError):
        quoted = value.replace("'", "\\'")
        way = f"  quote it for us and for the shell:  \"{key}='{quoted}'\""
        raise ConfigError(
            f"the value of {key} cannot be read: {value[:200]}\n"
            + (way if len(value) < 200 else "  try:  a shorter value, or --config FILE.yaml")
        ) from None

    if override.is_sweep_override():
        raise ConfigError(
            f"{key} is given several values, and a run takes one.\n"
            f"  for a run of each:  --multirun {key}={value}\n  for a list:  {key}=[{value}]\n"
            f"  for text with a comma:  \"{key}='{value}'\""
        )
    if override.package is not None:
        key = override.package
        if SECTIONS.get(key) != override.key_or_group or key == override.key_or_group:
            known = ", ".join(f"{kind}@{path}" for path, kind in SECTIONS.items() if kind != path)
            raise ConfigError(
                f"{text!r}: a key with '@' chooses the backend of another role: {known}.\n"
                f"  write it as:  {known.replace(', ', '=NAME or ')}=NAME"
            )
        return key, override.value()
    return override.key_or_group, override.value()
