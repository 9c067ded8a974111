"""Find the options of a composed configuration that differ from their defaults."""

from __future__ import annotations

from coupler.config.options import SECTIONS, TRACKER, Options, section
from coupler.config.schema import RunConfig
from coupler.system.plain import to_plain
from coupler.system.reads import original
from coupler.system.tree import value_at


def options_of(config: RunConfig) -> Options:
    """Return the options of a run whose backends were chosen."""
    config = original(config)
    chosen = {path: section(config, path) for path in (*SECTIONS, TRACKER)}
    return Options({path: type(inner) for path, inner in chosen.items() if inner is not None})


def not_default(config: RunConfig) -> list[str]:
    """Return the keys whose values are not the defaults."""
    config = original(config)
    values, options = to_plain(config), options_of(config)
    return [
        key
        for key, option in options.table.items()
        if value_at(values, key) != to_plain(option.default)
    ]
