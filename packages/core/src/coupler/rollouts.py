"""RolloutGroup: the replicas of an inference backend, seen as one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from coupler.errors import CouplerError
from coupler.imports import resolve
from coupler.interfaces import Completion, Model, Rank, Request
from coupler.workers import Executor


class RolloutGroup:
    """Routes requests to the replica with the fewest outstanding tokens; a session keeps the replica it got."""

    def __init__(self, executor: Executor, target: str, config: Any, model: Model, ranks: list[Rank]) -> None:
        self.executor, self.ranks = executor, ranks
        self.replicas = [executor.spawn("rollout", lambda: resolve(target)(config, model)) for _ in ranks]
        self.outstanding = [0] * len(ranks)
        self.sessions: dict[str, int] = {}

    async def setup(self) -> int:
        """Start every replica; return the number of model workers over all of them."""
        calls = [
            self.executor.call(replica, "setup", rank) for replica, rank in zip(self.replicas, self.ranks, strict=True)
        ]
        return sum(await asyncio.gather(*calls))

    async def all(self, method: str, *args: Any) -> list[Any]:
        return await asyncio.gather(*(self.executor.call(replica, method, *args) for replica in self.replicas))

    async def generate(self, request: Request) -> Completion:
        """Sample one completion; what an abort cut off is continued once from where it stopped.

        Raises:
            CouplerError: it was cut off twice.
        """
        done = await self._generate(request)
        if done.finish != "abort":
            return done
        rest = replace(request, prompt=request.prompt + done.tokens, max_tokens=request.max_tokens - len(done.tokens))
        more = await self._generate(rest)
        if more.finish == "abort":
            raise CouplerError("a rollout aborted the same request twice.\n  look at:  the rollout's log")
        return Completion(
            done.tokens + more.tokens, done.logprobs + more.logprobs, done.versions + more.versions, more.finish
        )

    async def _generate(self, request: Request) -> Completion:
        lightest = min(range(len(self.replicas)), key=self.outstanding.__getitem__)
        index = self.sessions.setdefault(request.session, lightest) if request.session else lightest
        cost = len(request.prompt) + request.max_tokens
        self.outstanding[index] += cost
        try:
            return await self.executor.call(self.replicas[index], "generate", request)
        finally:
            self.outstanding[index] -= cost
