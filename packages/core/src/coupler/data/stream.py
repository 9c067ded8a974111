"""Draw rows without end, epoch by epoch, in an order that two numbers resume."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from coupler.errors import DataError
from coupler.system.seeding import stream

T = TypeVar("T")


class PromptStream(Generic[T]):
    """Endless pass over ``rows``. Each epoch has an order of its own, derived from the
    seed and its number.
    """

    def __init__(self, rows: Sequence[T], seed: int, shuffle: bool) -> None:
        if not rows:
            raise DataError("there are no rows to draw prompts from.")
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self._start(0)

    def _start(self, epoch: int, position: int = 0) -> None:
        self.epoch = epoch
        self.position = position  # rows of this epoch that were handed out
        size = len(self.rows)
        self.order = (
            stream(self.seed, "data", epoch).permutation(size) if self.shuffle else np.arange(size)
        )

    def next(self) -> int:
        """Return the index of the next row in ``rows``."""
        if self.position == len(self.rows):
            self._start(self.epoch + 1)
        self.position += 1
        return int(self.order[self.position - 1])

    def finished(
        self, number: int, row: int, rewards: list[float], unfinished: Collection[int]
    ) -> None:
        """Learn how a row that was handed out went. This order depends on none.

        Args:
            number: the group's number of admission.
            rewards: of its completions, without those whose reward is invalid.
            unfinished: numbers of the groups that are not finished yet.
        """
        return None

    def state(self) -> dict[str, Any]:
        """Return the position in the stream as plain JSON."""
        return {"epoch": self.epoch, "position": self.position}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from ``state``, which is of the same rows."""
        self._start(state["epoch"], state["position"])
