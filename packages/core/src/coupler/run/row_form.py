"""Tell which form of rows a run trains on, and give their columns names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from coupler.config.schema import Job, RunConfig
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


def job_of(config: RunConfig, plugins: Plugins) -> Job:
    """Return the job that a configuration is for, as far as its algorithm tells."""
    able = capabilities(config, plugins)
    return Job.SFT if "job:sft" in able and "job:train" not in able else Job.TRAIN


def columns_of(config: RunConfig, plugins: Plugins, job: Job, section: str = "data") -> ColumnsOf:
    """Return what names the columns of a section of data.

    Supervised training takes conversations, and preferences are in ``data`` alone.
    """
    able = capabilities(config, plugins) if section == "data" else frozenset[str]()
    if PAIRS in able:
        return PairColumns
    if LABELS in able:
        return LabelColumns
    return partial(Columns, conversations=job is Job.SFT)


def sections(config: RunConfig, plugins: Plugins, job: Job) -> dict[str, ColumnsOf]:
    """Return :func:`columns_of` of every section of data."""
    return {key: columns_of(config, plugins, job, key) for key in ("data", "eval.data")}
