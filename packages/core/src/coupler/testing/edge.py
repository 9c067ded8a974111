"""Move weights from anywhere into one rollout, in a few lines for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from coupler.errors import ReplicaDied
from coupler.interfaces import (
    LORA,
    Endpoint,
    InFlight,
    Named,
    Rank,
    Rollout,
    SendReceipt,
    SyncReceipt,
    Transport,
    WeightUpdate,
    open_transport,
)
from coupler.loop.transfer import both_sides
from coupler.plugins.backend import Backend

T = TypeVar("T")


class Edge:
    """Connect one sender, one rollout and one transport."""

    def __init__(
        self, transport: Backend, rollout: Rollout, num_receivers: int, deadline_s: float = 120.0
    ) -> None:
        self.target, self.rollout = transport.target, rollout
        self.num_receivers, self.deadline_s = num_receivers, deadline_s
        self.transport: Transport = open_transport(self.target)
        self.endpoints: tuple[Endpoint, ...] = (self.transport.bind(Rank()),)
        self.version = -1

    async def push(
        self, weights: Iterable[Named], *, permuted: bool = False, adapter: bool = False
    ) -> tuple[SendReceipt, SyncReceipt]:
        """Send ``weights`` as the next version, and load them. The rollout is left as
        it is: running or paused.

        Args:
            adapter: they are those of an adapter, in format ``lora``.
        """
        self.version += 1
        update = WeightUpdate(
            version=self.version,
            format=LORA if adapter else "full",
            transport=self.target,
            endpoints=self.endpoints,
            num_receivers=self.num_receivers,
            deadline_s=self.deadline_s,
            permuted=permuted,
            adapter=adapter,
        )
        sending = asyncio.to_thread(self.transport.send, weights, update, Rank())
        async with asyncio.timeout(self.deadline_s):
            return await both_sides(sending, self.rollout.update(update))


class Served:
    """Hold a rollout with the event loop that it lives in, for calls from outside."""

    def __init__(self, rollout: Rollout, transport: Backend) -> None:
        self.rollout = rollout
        self.runner = asyncio.Runner()
        self.num_workers = self.runner.run(self._start())
        self.edge = Edge(transport, rollout, self.num_workers)

    async def _start(self) -> int:
        await self.rollout.prepare(Rank(seed=1))
        return await self.rollout.setup(Rank(seed=1))

    def run(self, work: Callable[[], Any], deadline_s: float = 120.0) -> Any:
        """Run the coroutine that ``work`` makes, within the deadline."""

        async def bounded() -> Any:
            async with asyncio.timeout(deadline_s):
                return await work()

        return self.runner.run(bounded())

    def push(
        self, weights: Iterable[Named], *, permuted: bool = False, adapter: bool = False
    ) -> tuple[SendReceipt, SyncReceipt]:
        return self.run(lambda: self.edge.push(weights, permuted=permuted, adapter=adapter))

    def revive(self) -> bool:
        """Start an inference engine again if it died. Return whether it had, and then
        has no weights.
        """
        try:
            self.run(lambda: self.rollout.pause(InFlight.DRAIN))
            self.run(self.rollout.resume)
            return False
        except ReplicaDied:
            self.run(self._set_up_again, deadline_s=400.0)
            return True

    async def _set_up_again(self) -> None:
        rollout: Any = self.rollout
        rollout.paused = None
        if not rollout.gate.is_set():
            await rollout.resume()
        await rollout.setup(Rank(seed=1))

    def close(self) -> None:
        self.rollout.close()
        self.runner.close()


def amid_tokens(attempt: Callable[[float], T], hit: Callable[[T], bool]) -> T:
    """Call ``attempt`` with several delays in seconds, and return its first result that
    is a hit.

    It pauses after the delay, and hits if that is between the first and the last token
    of what runs: a quick rollout is done soon, one beside other work begins late.

    Raises:
        AssertionError: no delay hit.
    """
    for delay in (0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 1.0, 3.0):
        found = attempt(delay)
        if hit(found):
            return found
    raise AssertionError("no pause came between the first and the last token of all requests")
