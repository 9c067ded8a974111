"""Tell which form of rows a run trains on, and give their columns names."""

from __future__ import annotations

from collections.abc import Callable

from coupler.config.schema import RunConfig
from coupler.data.columns import Columns
from coupler.data.options import DataConfig
from coupler.data.preferences import LabelColumns, PairColumns
from coupler.plugins.manager import Plugins

# Capabilities of an algorithm.
PAIRS, LABELS, SCORES = "rows:pair", "rows:label", "head:score"
ColumnsOf = Callable[[DataConfig, str], Columns]


def capabilities(config: RunConfig, plugins: Plugins) -> frozenset[str]:
    """Return those of the algorithm, or none where there is no algorithm."""
    if not config.algorithm:
        return frozenset()
    backend = plugins.get("algorithm", config.algorithm.name)
    return backend.capabilities_of(config.algorithm)


def columns_of(config: RunConfig, plugins: Plugins) -> ColumnsOf:
    """Return what names the columns of ``data``."""
    able = capabilities(config, plugins)
    if PAIRS in able:
        return PairColumns
    return LabelColumns if LABELS in able else Columns
