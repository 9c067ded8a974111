"""Sample from a judge, and start a replica of it again that died."""

from __future__ import annotations

import asyncio

from coupler.errors import ReplicaDied
from coupler.interfaces import Completion, InFlight, Request
from coupler.loop.rollout_group import RolloutGroup


class JudgeReplicas:
    """Starts dead replicas again before the next verdict, since no weight sync does.

    They load the weights of their folder as they did at first.
    """

    def __init__(self, rollouts: RolloutGroup) -> None:
        self.rollouts = rollouts
        self.reviving = asyncio.Lock()

    async def generate(self, request: Request) -> Completion:
        """Sample one verdict, from the start on another replica if one dies.

        Raises:
            ReplicaDied: a replica died too often.
        """
        while True:
            if self.rollouts.dead:
                await self._revive()
            try:
                return await self.rollouts.generate(request)
            except ReplicaDied:
                # The last one died, and the next turn of the loop starts it again.
                if not self.rollouts.dead:
                    raise

    async def _revive(self) -> None:
        async with self.reviving:
            if self.rollouts.dead:
                await self.rollouts.revive(InFlight.DRAIN)
                await self.rollouts.resume()
