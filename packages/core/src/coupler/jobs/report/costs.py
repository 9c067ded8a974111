"""Add up where the time and the memory of each group's steps went."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coupler.jobs.report.groups import Group

STEP = "time/step"
# The phases of a step follow each other. Other numbers of time/ are parts of them.
PHASES = ("time/sample", "time/complete", "time/train", "time/sync")
REST = "rest"
COLUMNS = 40
MEMORY = re.compile(r"memory/(.+)/(.+)_gib")


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of the steps of a group.

    Attributes:
        edges: first step of each stretch of steps, and the last step of all.
        tops: seconds up to the upper end of each phase, as the mean over a stretch
            [phases + 2, stretches]. The first row is 0, and the last is the step.
        means: mean seconds of a step in each phase and the rest [phases + 1].
    """

    edges: list[int]
    tops: np.ndarray
    means: np.ndarray


def times(group: Group) -> Time | None:
    """Return where the time went, or None where no step was timed."""
    rows = sorted(
        (step, [max(numbers.get(name) or 0.0, 0.0) for name in PHASES], total)
        for run in group.runs
        for step, numbers in run.steps.items()
        if (total := numbers.get(STEP) or 0.0) > 0
    )
    if not rows:
        return None

    steps = sorted({step for step, *_ in rows})
    starts = [part[0] for part in np.array_split(steps, min(COLUMNS, len(steps)))]
    spent = np.array([[*parts, max(total - sum(parts), 0.0)] for _, parts, total in rows])
    stretch = np.searchsorted(starts, [step for step, *_ in rows], side="right") - 1
    means = np.stack([spent[stretch == i].mean(axis=0) for i in range(len(starts))], axis=1)

    ground = np.zeros((1, len(starts)))
    tops = np.concatenate([ground, means.cumsum(axis=0)])
    return Time([*map(int, starts), steps[-1]], tops, spent.mean(axis=0))


def memory(groups: Sequence[Group]) -> list[tuple[str, str, list[float | None]]]:
    """Return phase, holder, and the most that each group held then, in GiB."""
    names = dict.fromkeys(
        name
        for group in groups
        for run in group.runs
        for numbers in run.steps.values()
        for name in numbers
        if name.startswith("memory/")
    )
    found = {name: match for name in names if (match := MEMORY.fullmatch(name))}
    most = {name: [_most(group, name) for group in groups] for name in found}
    return [(match[1], match[2], most[name]) for name, match in found.items()]


def _most(group: Group, name: str) -> float | None:
    curve = group.curve(name)
    return max(float(curve.high.max()), 0.0) if curve else None
