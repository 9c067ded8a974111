"""Handle nested mappings whose keys are written with dots, such as ``engine.lr``."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any


def nest(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return nested mappings for dotted keys. The last value of a key wins."""
    tree: dict[str, Any] = {}
    for key, value in pairs:
        first, *inner = key.split(".")
        for name in reversed(inner):
            value = {name: value}
        tree = merge(tree, {first: value})
    return tree


def flatten(values: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    """Return dotted keys and their values. An empty mapping is a value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{start}{name}.")
        else:
            flat[f"{start}{name}"] = value
    return flat


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``low`` with the values of ``high`` on top, section by section."""
    merged = dict(low)
    for name, value in high.items():
        below = merged.get(name)
        merged[name] = (
            merge(below, value)
            if isinstance(below, Mapping) and isinstance(value, Mapping)
            else value
        )
    return merged


def value_at(values: Any, key: str) -> Any:
    """Return the value under a dotted key, or None if there is none."""
    for name in key.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def replace_at(values: dict[str, Any], key: str, new: Mapping[str, Any] | None) -> None:
    """Put another section under a dotted key.

    An empty one is taken out, with every section that it leaves empty, so that none
    looks set.
    """
    first, _, rest = key.partition(".")
    if rest and isinstance(values.get(first), dict):
        replace_at(values[first], rest, new)
        new = values[first]
    elif rest:
        return
    values.pop(first, None)
    if new:
        values[first] = new


def wipe(
    layers: Iterable[dict[str, Any]],
    high: Iterable[tuple[str, Any]],
    keys: Container[str],
    empty: Any,
) -> None:
    """Take out of lower layers what ``high`` sets to ``empty``, among ``keys``.

    Merging alone would keep all that they have there.
    """
    wiped = [key for key, value in high if value == empty and key in keys]
    for layer in layers:
        for key in wiped:
            replace_at(layer, key, None)
