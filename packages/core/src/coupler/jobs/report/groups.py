"""Put runs together that differ by their seed alone, and find what else differs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from coupler.jobs.report.reading import Run

SEED, PLACE = "seed", "run_dir"
NOT_SET = "not set"


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of a group, over the steps that have it.

    Attributes:
        steps: numbers of the steps [n].
        mean: mean over the runs that have the step [n].
        low: smallest value of these runs [n].
        high: largest value of these runs [n].
        left_out: values of all runs that were not finite.
    """

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    left_out: int = 0

    def thinned(self, limit: int) -> Curve:
        """Return at most about ``limit`` steps, all of them real.

        The first and the last step stay. So do the lowest and the highest value in each
        stretch of steps, so that no peak is lost.
        """
        if (n := len(self.steps)) <= limit:
            return self

        edges = np.linspace(0, n, max(limit // 2, 1) + 1).astype(int)
        kept = {0, n - 1}
        for start, end in pairwise(edges):
            kept |= {start + int(self.low[start:end].argmin())}
            kept |= {start + int(self.high[start:end].argmax())}
        at = np.array(sorted(kept))
        return Curve(self.steps[at], self.mean[at], self.low[at], self.high[at], self.left_out)


@dataclass(frozen=True, slots=True)
class Group:
    """Runs whose configurations are equal but for ``seed`` and ``run_dir``."""

    runs: list[Run]

    @property
    def name(self) -> str:
        """The names of its runs, shortened where they are more than two."""
        names = [run.name for run in self.runs]
        return " and ".join(names if len(names) < 3 else [names[0], f"{len(names) - 1} more"])

    def curve(self, metric: str) -> Curve | None:
        """Return a metric over the steps, or None where no run has a finite value."""
        found: defaultdict[int, list[float]] = defaultdict(list)
        left_out = 0
        for run in self.runs:
            for step, value in run.column(metric):
                if value is None:
                    left_out += 1
                else:
                    found[step].append(value)

        if not found:
            return None
        steps = sorted(found)
        mean, low, high = (np.array([f(found[s]) for s in steps]) for f in (_mean, min, max))
        return Curve(np.array(steps), mean, low, high, left_out)


def group(runs: Sequence[Run]) -> list[Group]:
    """Return the groups in the order of their first runs."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        rest = {key: value for key, value in run.config.items() if key not in (SEED, PLACE)}
        found.setdefault(json.dumps(rest, sort_keys=True, default=str), []).append(run)
    return [Group(together) for together in found.values()]


def differences(groups: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """Return the options that are not the same in all runs, except ``run_dir``.

    Returns:
        The full key, and the text of its value in each group. The seeds of a group
        stand side by side.
    """
    keys = dict.fromkeys(key for each in groups for run in each.runs for key in run.config)
    rows = [
        (key, [", ".join(dict.fromkeys(_text(run.config, key) for run in g.runs)) for g in groups])
        for key in keys
        if key not in (SEED, PLACE)
    ]
    seeds = [", ".join(_text(run.config, SEED) for run in each.runs) for each in groups]
    return [(SEED, seeds), *(row for row in rows if len({*row[1]}) > 1)]


def _text(config: dict[str, Any], key: str) -> str:
    """Write a value as YAML would, a text without its quotes."""
    value = config.get(key, NOT_SET)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
