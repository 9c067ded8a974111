"""RolloutGroup: the replicas of an inference backend, seen as one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from coupler.config.plain import Section
from coupler.errors import CouplerError
from coupler.executors import Executor
from coupler.imports import resolve
from coupler.interfaces import Completion, Model, Rank, Request, Rollout


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """What a replica is built from, in any process: names and plain config, never a class."""

    rollout: str  # "package.module:Class"
    config: Any
    model: Model

    def __reduce__(self) -> Any:
        """Cross to another process without the plugin's configuration class."""
        return _received, (self.rollout, Section.of(self.config), self.model)


def _received(rollout: str, section: Section, model: Model) -> RolloutSpec:
    return RolloutSpec(rollout, section.open(), model)


def build(spec: RolloutSpec) -> Rollout:
    """Make one replica, in the process where it lives."""
    return resolve(spec.rollout)(spec.config, spec.model)


class RolloutGroup:
    """Routes requests to the replica with the fewest outstanding tokens; a session keeps the replica it got."""

    def __init__(self, executor: Executor, target: str, config: Any, model: Model, ranks: list[Rank]) -> None:
        self.executor, self.ranks = executor, ranks
        spec = RolloutSpec(target, config, model)
        self.replicas = [
            executor.spawn("rollout", rank.index, "coupler.rollouts:build", spec, config.python) for rank in ranks
        ]
        self.outstanding = [0] * len(ranks)
        self.sessions: dict[str, int] = {}

    async def setup(self) -> int:
        """Start every replica; return the number of model workers over all of them.

        A replica is a world of its own: what it gets is its place, with rank 0 of 1.
        """
        self.ranks = await self.executor.locate(self.replicas, self.ranks)
        alone = [(replace(rank, index=0, world=1, rendezvous=""),) for rank in self.ranks]
        return sum(await self.executor.each(self.replicas, "setup", alone))

    async def all(self, method: str, *args: Any) -> list[Any]:
        return await self.executor.each(self.replicas, method, [args] * len(self.replicas))

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
