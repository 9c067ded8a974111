"""Read the YAML presets that plugins ship: ``CONF/engine/fast.yaml`` is
``engine=fast``.

A preset names in ``defaults`` what it builds on: backends or other presets of its kind,
and ``_self_`` for its own values. Later entries win. Without ``_self_`` its own values
come last, as in Hydra. ``CONF/preset/small.yaml`` is ``preset=small``, of a whole run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from coupler.errors import PluginError
from coupler.plugins.manager import Plugins, Source
from coupler.system.plain import to_plain
from coupler.system.tree import merge
from coupler.system.yaml_layers import PRESET, SELF

Found = dict[str, list[tuple[Source, str]]]


def chosen_values(plugins: Plugins, kind: str, name: str) -> dict[str, Any]:
    """Return the plain values of ``kind=name``, a backend's defaults or a preset's.

    Raises:
        PluginError: nothing is called so, several things are, or a preset is wrong.
    """
    return _values(plugins, kind, name, plugins.presets(kind, name), ())


def preset_text(plugins: Plugins, name: str) -> str:
    """Return the YAML of ``preset=NAME``, whose plugin is of the run from here on."""
    found = plugins.presets(PRESET, name)
    _check_one_meaning(plugins, PRESET, name, found)
    source, text = found[name][0]
    plugins.use(source)
    return text


def _values(
    plugins: Plugins, kind: str, name: str, presets: Found, above: tuple[str, ...]
) -> dict[str, Any]:
    _check_one_meaning(plugins, kind, name, presets)
    owner = plugins.owner_of(kind, name)
    if name not in presets or (owner and owner.is_core):
        return to_plain(plugins.get(kind, name).config())

    source, text = presets[name][0]
    # The plugin is of the run from here on.
    plugins.use(source)
    own = _read(kind, name, text)
    entries = own.pop("defaults", [])
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise _wrong(kind, name, f"its defaults are {entries!r}, and must be a list of names")
    if again := {*entries} & {*above, name}:
        raise _wrong(kind, name, f"it builds on {', '.join(sorted(again))}, which builds on it")

    values: dict[str, Any] = {}
    for entry in entries if SELF in entries else (*entries, SELF):
        values = merge(
            values, own if entry == SELF else _values(plugins, kind, entry, presets, (*above, name))
        )
    return values


def _check_one_meaning(plugins: Plugins, kind: str, name: str, presets: Found) -> None:
    owner = plugins.owner_of(kind, name)
    if name not in presets:
        if owner is None:
            plugins.get(kind, name, also=tuple(presets))
        return
    if owner and owner.is_core:
        return

    # The same text has one meaning, whoever ships it.
    owners = list({text: source for source, text in reversed(presets[name])}.values())
    owners += [owner] if owner else []
    if len(owners) > 1:
        raise PluginError(
            f"{kind}={name} has several meanings, from {' and '.join(map(str, owners))}.\n"
            f"  try:  COUPLER_DISABLE_PLUGINS={owners[-1].name}"
        )


def _read(kind: str, name: str, text: str) -> dict[str, Any]:
    try:
        values = OmegaConf.to_container(OmegaConf.create(text))
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise _wrong(kind, name, str(error).splitlines()[0]) from None
    if not isinstance(values, Mapping):
        raise _wrong(kind, name, "it is no mapping of options to values")
    return {str(key): value for key, value in values.items()}


def _wrong(kind: str, name: str, why: str) -> PluginError:
    return PluginError(f"the preset {kind}={name} cannot be composed: {why}.")
