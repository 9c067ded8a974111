"""Count reward calls, and stop a run in which too many are invalid."""

from __future__ import annotations

from collections import Counter, deque
from textwrap import indent

from coupler.errors import RewardError
from coupler.metrics import Metric, Metrics
from coupler.rewards.result import Invalid, Scored

# Fewer invalid calls than this never stop a run.
MIN_INVALID = 5
# The last calls are judged on their own, so that a reward that breaks late cannot hide
# behind the valid calls before.
RECENT = 64


class Tally:
    """The calls of a reward so far.

    Args:
        name: that of the reward in messages.
        option: where the user named it, such as ``reward.target=my.py:score``.
    """

    def __init__(self, name: str, option: str, max_invalid_fraction: float) -> None:
        self.name, self.option = name, option
        self.max_invalid_fraction = max_invalid_fraction
        self.reasons: Counter[str] = Counter()
        self.first_detail = ""
        self._num_calls = 0
        # The names of the parts of rewards, once there is one.
        self._parts: list[str] | None = None
        # One entry for each of the last calls: True if it was invalid.
        self._recent: deque[bool] = deque(maxlen=RECENT)
        self._step: list[Scored] = []

    def count(self, scored: Scored) -> None:
        """Count a result.

        Raises:
            RewardError: too many were invalid. These are at least 5, and either more
                than ``max_invalid_fraction`` of all or most of the last 64. Or this
                one has other parts than those before.
        """
        self.check_parts(scored)
        self._step.append(scored)
        self._num_calls += 1
        self._recent.append(isinstance(scored.result, Invalid))
        if isinstance(scored.result, Invalid):
            self.reasons[scored.result.reason] += 1
            self.first_detail = self.first_detail or scored.detail

        count, limit = self.reasons.total(), self.max_invalid_fraction
        burst = len(self._recent) == RECENT and sum(self._recent) > max(0.5, limit) * RECENT
        if count >= MIN_INVALID and (count > limit * self._num_calls or burst):
            raise RewardError(self._complaint())

    def check_parts(self, scored: Scored) -> None:
        """Refuse a reward that has other parts than those before.

        Parts of parts, which have a slash in their names, belong to one function of
        several, and are checked with it.

        Raises:
            RewardError: it has.
        """
        if isinstance(scored.result, Invalid):
            return

        names = sorted(name for name in scored.parts if "/" not in name)
        if self._parts is None:
            self._parts = names
        if names != self._parts:
            now, before = (", ".join(each) or "none" for each in (names, self._parts))
            raise RewardError(
                f"a reward has other parts than those before: {now} and not {before}.\n"
                f"  look at:  {self.option}, which gives the same parts each time"
            )

    def metrics(self) -> Metrics:
        """Return rates and the longest call (seconds) since the last call of this."""
        step, self._step = self._step, []

        return {
            "reward/invalid_rate": Metric(
                sum(isinstance(s.result, Invalid) for s in step), len(step)
            ),
            "reward/timeout_rate": Metric(sum(s.timed_out for s in step), len(step)),
            "time/reward_max": Metric(max((s.seconds for s in step), default=0.0), how="max"),
        }

    def _complaint(self) -> str:
        recent = f"{sum(self._recent)} of the last {len(self._recent)}"
        lines = [
            (
                f"{self.reasons.total()} of {self._num_calls} calls of {self.name} gave no valid "
                f"number ({recent})."
            ),
            f"  limit:   reward.max_invalid_fraction={self.max_invalid_fraction}",
            *(f"  reason:  {count} x {reason}" for reason, count in self.reasons.most_common(5)),
        ]

        if self.first_detail:
            lines += ["  the first of them:", indent(self.first_detail.rstrip(), "    ")]
        return "\n".join(lines)
