"""Decide when supervised training evaluates, saves and ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from coupler.config.schema import RunConfig
from coupler.run.saving import due, epoch_due


@dataclass
class Patience:
    """Tells when a metric has not got better for too long.

    Attributes:
        best: the best value so far, or None.
        since: evaluations since then.
    """

    config: RunConfig
    best: float | None = None
    since: int = 0

    def hear(self, values: Mapping[str, float]) -> None:
        """Learn the values of a step. Those without the metric say nothing."""
        settings = self.config.checkpoint
        value = values.get(settings.best_metric)
        if not self.config.eval.patience or value is None:
            return

        sign = -1 if settings.lower_is_better else 1
        better = self.best is None or sign * value > sign * self.best
        self.since = 0 if better and isfinite(value) else self.since + 1
        self.best = value if better and isfinite(value) else self.best

    @property
    def over(self) -> bool:
        """Tell whether the run is to end."""
        return 0 < self.config.eval.patience <= self.since

    def state(self) -> dict[str, Any]:
        """Return the state as plain JSON."""
        return {"best": self.best, "since": self.since}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        self.best, self.since = state["best"], state["since"]


@dataclass(frozen=True, slots=True)
class Calendar:
    """Tells what is due after a step of supervised training."""

    config: RunConfig
    num_examples: int

    def evaluates(self, step: int) -> bool:
        """Tell whether an evaluation is due: at the start if that is wanted, every so
        many steps or epochs, and after the last step of a run that does so.
        """
        settings = self.config.eval
        if step == 0:
            return settings.at_start
        repeats = settings.every_steps or settings.every_epochs
        last = step == self.config.steps and repeats > 0
        return last or due(settings.every_steps, step) or self._epoch(settings.every_epochs, step)

    def saves(self, step: int) -> bool:
        """Tell whether a checkpoint is due at the end of an epoch."""
        return self._epoch(self.config.checkpoint.every_epochs, step)

    def _epoch(self, every: int, step: int) -> bool:
        return epoch_due(every, step, self.config.prompts_per_step, self.num_examples)
