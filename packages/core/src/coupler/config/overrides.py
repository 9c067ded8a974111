"""Read the user's options, from the command line and from a YAML file, as plain
nested mappings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from coupler.config.options import SECTIONS
from coupler.errors import ConfigError
from coupler.system.tree import nest


def parse_overrides(overrides: list[str]) -> list[tuple[str, Any]]:
    """Read ``key=value`` arguments in Hydra's grammar.

    A leading ``+`` or ``++`` has no effect, because no key can be added.

    Raises:
        ConfigError: one cannot be read, holds several values, or deletes.
    """
    parser = OverridesParser.create()
    return [_named(*_parse(parser, text)) for text in overrides]


def read_file(path: str) -> dict[str, Any]:
    """Read a YAML file of options. Interpolations stay as they are.

    Raises:
        ConfigError: there is none, or it is no YAML mapping.
    """
    if not Path(path).is_file():
        raise ConfigError(
            f"there is no configuration file {path}.\n  it is looked up from:  {Path.cwd()}"
        )

    try:
        values = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is not readable as YAML: {' '.join(str(exc).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} is a list, but a configuration is a mapping of options to values."
        )
    return nest([_named(str(key), value) for key, value in values.items()])


def _named(key: str, value: Any) -> tuple[str, Any]:
    """Read ``engine=x`` as ``engine.name=x``."""
    return (f"{key}.name", value) if key in SECTIONS and isinstance(value, str) else (key, value)


def _parse(parser: OverridesParser, text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    key = key.lstrip("+").strip()
    if text.startswith("~"):
        raise ConfigError(
            f"{text!r}: options cannot be deleted.\n  try:  set {key.lstrip('~')} to its default"
        )
    if not equals or not key:
        raise ConfigError(
            f"{text!r} is no override.\n  write it as:  key=value, for example engine.lr=1e-6"
        )

    try:
        override = parser.parse_override(f"{key}={value}")
    except HydraException:
        shown = value.replace("'", "\\'")
        raise ConfigError(
            f"the value of {key} cannot be read: {value}\n  quote it for us and for the "
            f"shell:  \"{key}='{shown}'\""
        ) from None

    if override.is_sweep_override():
        raise ConfigError(
            f"{key} is given several values, and a run takes one.\n  for a list:  {key}=[{value}]\n"
            f"  for text with a comma:  \"{key}='{value}'\""
        )
    if override.package is not None:
        key = override.package
        if SECTIONS.get(key) != override.key_or_group or key == override.key_or_group:
            known = ", ".join(f"{kind}@{path}" for path, kind in SECTIONS.items() if kind != path)
            raise ConfigError(
                f"{text!r}: a key with '@' chooses the backend of another role: {known}."
            )
        return key, override.value()
    return override.key_or_group, override.value()
