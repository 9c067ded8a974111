"""Hold finished prompt groups until they are trained on, and bound their staleness."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np

from coupler.batch import Batch
from coupler.errors import CouplerError


class Buffer:
    """Counts prompt groups from admission to training.

    Consumes scored groups from the Sampler (:meth:`put`, :meth:`reject`), produces the
    groups of a step for the Trainer (:meth:`take`). :meth:`admit` waits until a further
    prompt cannot become staler than ``max_staleness``: ``submitted - rejected <=
    (version + 1 + max_staleness) * prompts_per_step``. :meth:`advance` and
    :meth:`reject` unblock it. This bounds the age of what is trained on, because groups
    leave in the order in which they were admitted, however long one of them takes.
    """

    def __init__(self, prompts_per_step: int, max_staleness: int, max_rejected: int) -> None:
        self.prompts_per_step = prompts_per_step
        self.max_staleness = max_staleness
        self.max_rejected = max_rejected

        self.version = 0
        self.submitted = 0
        self.rejected = 0
        self.rejected_in_step = 0
        # numbers of groups that were neither taken nor rejected, in order
        self.admitted: list[int] = []
        # the scored ones among them
        self.ready: dict[int, Batch] = {}
        self.failure: BaseException | None = None
        self.changed = asyncio.Condition()

    async def admit(self) -> int:
        """Wait until one more prompt may be started, and return its number."""
        async with self.changed:
            await self.changed.wait_for(self.has_room)
            self.admitted.append(self.submitted)
            self.submitted += 1
            return self.admitted[-1]

    def has_room(self) -> bool:
        """Return whether :meth:`admit` would return at once."""
        limit = (self.version + 1 + self.max_staleness) * self.prompts_per_step
        return self.submitted - self.rejected < limit

    async def put(self, number: int, group: Batch) -> None:
        """Add a scored group."""
        async with self.changed:
            self.ready[number] = group
            self.changed.notify_all()

    async def reject(self, number: int, why: str) -> None:
        """Drop a refused group, so that another one may be started in its place."""
        async with self.changed:
            self.admitted.remove(number)
            self.rejected += 1
            self.rejected_in_step += 1

            if self.rejected_in_step > self.max_rejected:
                self.failure = CouplerError(
                    f"{self.rejected_in_step} prompt groups in a row of one step were rejected, "
                    f"the last because {why}.\n"
                    "  try:  data of another difficulty, algorithm.dynamic_sampling=false, "
                    "or a larger max_rejected_factor"
                )
            self.changed.notify_all()

    async def fail(self, error: BaseException) -> None:
        """Make the waiting trainer raise ``error``."""
        async with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    async def take(self, parts: int = 1) -> AsyncIterator[list[Batch]]:
        """Wait for the groups of a step, and yield them in the order of admission.

        Args:
            parts: how many lists they come in, each as soon as its groups are scored.
        """
        for numbers in np.array_split(range(self.prompts_per_step), parts):
            if len(numbers):
                yield await self._first(len(numbers))
        self.rejected_in_step = 0

    async def _first(self, count: int) -> list[Batch]:
        """Wait for the first ``count`` of the admitted groups, and take them."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.failure or self._are_ready(count))
            if self.failure:
                raise self.failure
            first, self.admitted = self.admitted[:count], self.admitted[count:]
            return [self.ready.pop(number) for number in first]

    def _are_ready(self, count: int) -> bool:
        first = self.admitted[:count]
        return len(first) == count and self.ready.keys() >= set(first)

    def state(self) -> dict[str, Any]:
        """Return the counters as plain JSON, without the groups of ``ready``."""
        counters = ("version", "submitted", "rejected", "rejected_in_step")
        return {key: getattr(self, key) for key in counters} | {"admitted": [*self.admitted]}

    def restore(self, state: Mapping[str, Any], ready: Mapping[int, Batch]) -> None:
        """Go on from ``state`` with the groups ``ready``."""
        self.version, self.submitted = state["version"], state["submitted"]
        self.rejected, self.rejected_in_step = state["rejected"], state["rejected_in_step"]
        self.admitted, self.ready = list(state["admitted"]), dict(ready)

    def start_at(self, version: int) -> None:
        """Begin at ``version``, as if its steps had used every admitted prompt."""
        self.version, self.submitted = version, version * self.prompts_per_step

    async def advance(self, version: int) -> None:
        """Record that the rollouts hold ``version`` now."""
        async with self.changed:
            self.version = version
            self.changed.notify_all()
