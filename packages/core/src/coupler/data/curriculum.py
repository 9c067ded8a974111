"""Pick rows by what the policy earned on them before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coupler.data.stream import PromptStream
from coupler.errors import DataError


class ByReward:
    """Rests rows that are too easy or too hard for the policy.

    A row whose last mean reward is at most ``low`` or at least ``high`` is passed over
    for ``rest`` epochs, and then tried again. An epoch in which all rows rest takes
    its last one. The order of an epoch is that of a run without a sampler.

    Example:
        ``data.sampler=coupler.data.curriculum:ByReward data.sampler_args={high: 0.9}``
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        seed: int,
        low: float = 0.0,
        high: float = 1.0,
        rest: int = 3,
    ) -> None:
        if not low < high or rest < 1:
            raise DataError(
                f"data.sampler_args: low={low} must be below high={high}, and rest={rest} at "
                "least 1."
            )

        self.low, self.high, self.rest = low, high, rest
        self.order = PromptStream(rows, seed, shuffle=True)
        self.wakes: dict[int, int] = {}  # row -> epoch in which it is taken again
        self.taken = 0  # rows of this epoch that did not rest

    def next(self) -> int:
        """Return the next row that does not rest."""
        while True:
            row = self.order.next()
            if self.order.position == 1:
                self.taken = 0
            ends = self.order.position == len(self.order.rows)
            if self.wakes.get(row, 0) <= self.order.epoch or (ends and not self.taken):
                self.taken += 1
                return row

    def update(self, row: int, rewards: Sequence[float]) -> None:
        """Let the row rest, or take it in the next epoch again."""
        if not rewards:
            return
        self.wakes.pop(row, None)
        if not self.low < sum(rewards) / len(rewards) < self.high:
            self.wakes[row] = self.order.epoch + 1 + self.rest

    def state(self) -> dict[str, Any]:
        """Return the place in the data and the rows that rest, as plain JSON."""
        wakes = [[row, epoch] for row, epoch in sorted(self.wakes.items())]
        return {"order": self.order.state(), "wakes": wakes, "taken": self.taken}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        self.order.restore(state["order"])
        self.wakes, self.taken = dict(state["wakes"]), state["taken"]
