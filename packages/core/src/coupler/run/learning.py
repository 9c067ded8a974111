"""Notice that a run learns nothing, and say why that is likely."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from coupler.batch import Batch
from coupler.run.samples import brief

# A run is judged by so many steps in a row, and shows so many completions.
STEPS, SHOWN = 5, 3
# An entropy below this many nats, and this share of what it was, has collapsed.
NATS, SHARE = 0.05, 0.1

# Metrics of tokens that are learnt without an advantage.
IMITATED = {"nll", "nll_demo", "gkd"}

# Gets a step, its batch and some rows, and returns them as samples.
Lines = Callable[[int, Batch, Sequence[int]], list[dict[str, Any]]]


class LearningWatch:
    """Looks at the metrics of every step, and speaks once.

    Attributes:
        batch: that of the last step.

    Args:
        max_tokens: ``sampling.max_tokens``.
        lines: makes samples of rows.
    """

    def __init__(self, max_tokens: int, lines: Lines) -> None:
        self.max_tokens, self.lines = max_tokens, lines
        self.batch: Batch | None = None
        self.last: deque[Mapping[str, float]] = deque(maxlen=STEPS)
        self.entropies: list[float] = []
        self.has_spoken = False

    def judge(self, step: int, metrics: Mapping[str, float]) -> str:
        """Return what to tell the user after a step, which is nothing most of the time.

        Args:
            metrics: values of the step, by name.
        """
        if self.batch is None or self.has_spoken:
            return ""

        self.last.append(metrics)
        if len(self.entropies) < STEPS and "entropy" in metrics:
            self.entropies.append(metrics["entropy"])
        why = self._why() if len(self.last) == STEPS else ""
        if not why:
            return ""

        self.has_spoken = True
        _, rows = np.unique(self.batch["group"], return_index=True)
        shown = [brief(line) for line in self.lines(step, self.batch, rows[:SHOWN].tolist())]
        return "\n".join([f"the run learns nothing: in the last {STEPS} steps {why}", *shown])

    def _why(self) -> str:
        """Return the reason that is most likely, if there is one."""
        reward = self.last[-1].get("reward/mean", 0.0)

        if self._each("batch/truncated", 1.0):
            return (
                f"every completion was cut at the limit of tokens, sampling.max_tokens="
                f"{self.max_tokens}.\n  try:  a higher sampling.max_tokens, or a prompt that asks "
                "for less"
            )
        # What a teacher says is an advantage, too, beside a reward that never changes.
        level = self._each("advantages/min", 0.0) and self._each("advantages/max", 0.0)
        # What is imitated has a loss without an advantage.
        level = level and not IMITATED & self.last[-1].keys()
        if level and self._each("reward/min", reward) and self._each("reward/max", reward):
            return (
                f"every completion got the same reward, {reward:g}.\n  look at:  the reward, with "
                "the completions below and coupler doctor data, or take easier rows"
            )
        if level:
            return (
                "all completions of a prompt got equal rewards, so that none was better.\n  try:  "
                "rows that are neither too easy nor too hard, or a higher samples_per_prompt"
            )
        if self._each("train/grad_norm", 0.0):
            return (
                "the gradient was 0, although rewards differ.\n  look at:  clip_*, rejected and "
                "*_masked in metrics.jsonl, which say what the loss leaves out"
            )
        return self._collapse()

    def _collapse(self) -> str:
        first = sum(self.entropies) / max(len(self.entropies), 1)
        now = [metrics.get("entropy", first) for metrics in self.last]
        if max(now) >= min(NATS, SHARE * first):
            return ""
        return (
            f"the entropy was at most {max(now):.2g} nats a token, and {first:.2g} at first: the "
            "policy says the same each time.\n  try:  a lower engine.lr, a higher "
            "algorithm.clip_high, or an earlier checkpoint"
        )

    def _each(self, name: str, value: float) -> bool:
        """Tell whether a metric had this value in each of the last steps."""
        return all(metrics.get(name) == value for metrics in self.last)
