"""RolloutGroup: the replicas of an inference backend, seen as one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from coupler.errors import CouplerError, ReplicaDied
from coupler.executors import Executor
from coupler.interfaces import Completion, Finish, InFlight, Memory, Model, Rank, Request, SyncReceipt, WeightUpdate
from coupler.worker.replica import RolloutSpec

FINISHES = get_args(Finish)
FULLER = 1.125  # than the mean, a replica may be so that samples of one prompt meet in its prefix cache
MAX_RESTARTS = 3  # of one replica in a run: one that dies again and again has a cause that a restart does not mend


def _joined(first: Any, rest: Any) -> Any:
    """Routes of a completion that was cut off: of its first part those that sampled it, the rest from the second."""
    if first is None:
        return None
    fed = first.max(axis=(1, 2), keepdims=True) >= 0
    whole = rest.copy()
    whole[: len(first)] = np.where(fed, first, rest[: len(first)])
    return whole


def _continued(done: Completion, more: Completion) -> Completion:
    """A completion that was cut off, with what a second request went on with."""
    return Completion(
        done.tokens + more.tokens,
        done.logprobs + more.logprobs,
        done.versions + more.versions,
        more.finish,
        _joined(done.routed_experts, more.routed_experts),
        more.replica,
    )


class RolloutGroup:
    """Routes requests to the replica with the fewest outstanding tokens; a session keeps the replica it got.

    What a dead replica was sampling goes to another one; it is started again by :meth:`revive`, in time for the
    next weights.
    """

    def __init__(self, executor: Executor, target: str, config: Any, model: Model, ranks: list[Rank]) -> None:
        self.executor, self.ranks = executor, ranks
        spec = RolloutSpec(target, config, model)
        self.replicas = [
            executor.spawn("rollout", rank.index, "coupler.worker.replica:build", spec, config.python) for rank in ranks
        ]
        self.num_workers = [0] * len(ranks)
        self.outstanding = [0] * len(ranks)
        self.restarts = [0] * len(ranks)
        self.dead: set[int] = set()
        self.cause = ""  # how the last one died
        self.sessions: dict[str, int] = {}
        self.pauses = 0

    @property
    def num_receivers(self) -> int:
        """Model workers over all living replicas."""
        return sum(self.num_workers[i] for i in self._living())

    def _living(self) -> list[int]:
        return [i for i in range(len(self.replicas)) if i not in self.dead]

    async def setup(self) -> None:
        """Start every replica.

        A replica is a world of its own: what it gets is its place, with rank 0 of 1.
        """
        self.ranks = await self.executor.locate(self.replicas, self.ranks)
        alone = [(self._alone(i),) for i in range(len(self.ranks))]
        self.num_workers = await self.executor.each(self.replicas, "setup", alone)

    def _alone(self, index: int) -> Rank:
        return replace(self.ranks[index], index=0, world=1, rendezvous="")

    async def all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every living replica; one result each. What dies of it is dead from then on.

        Raises:
            ReplicaDied: none lives any more.
        """
        answers = await self.tell(method, *args)
        if not answers:
            raise self._extinct()
        return answers

    async def tell(self, method: str, *args: Any) -> list[Any]:
        """As :meth:`all`, for what the next pause mends: that all of them are dead is no error yet."""
        answers = await asyncio.gather(*(self._call(i, method, *args) for i in self._living()))
        return [answer for answer in answers if not isinstance(answer, ReplicaDied)]

    def _extinct(self) -> ReplicaDied:
        return ReplicaDied(f"no rollout replica is left: {self.cause}")

    async def _call(self, index: int, method: str, *args: Any) -> Any:
        """What a replica answers, or how it died."""
        try:
            return await self.executor.call(self.replicas[index], method, *args)
        except ReplicaDied as error:
            self.dead.add(index)
            self.cause = str(error)
            return error

    async def update(self, update: WeightUpdate) -> list[SyncReceipt]:
        """Bring weights to every living replica.

        Raises:
            ReplicaDied: one died of it. No replica is being updated any more, and some may hold half of the weights.
        """
        running = [asyncio.ensure_future(self._update(i, update)) for i in self._living()]
        try:
            await asyncio.wait(running)
        finally:
            for task in running:
                task.cancel()
        failed = [error for task in running if (error := task.exception())]
        for error in sorted(failed, key=lambda error: not isinstance(error, ReplicaDied)):  # the cause of all others
            raise error
        return [task.result() for task in running]

    async def _update(self, index: int, update: WeightUpdate) -> SyncReceipt:
        answer = await self._call(index, "update", update)
        if isinstance(answer, ReplicaDied):
            await asyncio.to_thread(update.open().call_off, update, self.num_workers[index])
            raise answer
        return answer

    async def pause(self, in_flight: InFlight) -> None:
        """Pause every living replica; one that turns out to be dead is for :meth:`revive`."""
        self.pauses += 1
        await self.tell("pause", in_flight)

    async def resume(self) -> None:
        """Let every living replica sample again."""
        await self.tell("resume")

    async def holds_base(self) -> bool:
        """Return whether every living replica holds the weights beneath an adapter."""
        return all(await self.all("holds_base"))

    async def sample_on_each(self, request: Request) -> list[Completion]:
        """Sample one completion on every living replica."""
        return await self.all("generate", request)

    async def sleep(self, what: frozenset[Memory]) -> None:
        """Free this memory on every living replica."""
        await self.tell("sleep", what)

    async def wake(self, what: frozenset[Memory]) -> None:
        """Undo :meth:`sleep`."""
        await self.tell("wake", what)

    async def device_bytes(self) -> int:
        """Return the device memory of the replica that holds most."""
        return max(await self.tell("device_bytes"), default=0)

    async def host_bytes(self) -> int:
        """Return the host memory of the replica that holds most."""
        return max(await self.tell("host_bytes"), default=0)

    async def revive(self, in_flight: InFlight) -> None:
        """Start those that died again; they are paused, and wait for weights like the others.

        Raises:
            ReplicaDied: a replica was started ``MAX_RESTARTS`` times already.
        """
        for index in sorted(self.dead):
            self.restarts[index] += 1
            if self.restarts[index] > MAX_RESTARTS:
                raise ReplicaDied(
                    f"rollout replica {index} died {self.restarts[index]} times.\n  look at:  the log of this replica"
                )
            print(f"coupler: rollout replica {index} died; starting it again")
            self.replicas[index] = await self.executor.revive(self.replicas[index])
            self.num_workers[index] = await self.executor.call(self.replicas[index], "setup", self._alone(index))
            await self.executor.call(self.replicas[index], "pause", in_flight)
            self.dead.discard(index)

    async def generate(self, request: Request) -> Completion:
        """Sample one completion; what a pause cut off is continued from where it stopped.

        Raises:
            CouplerError: it was cut off again, and nobody had paused meanwhile.
            ReplicaDied: no replica lives.
        """
        done, pauses = await self._generate(request), self.pauses
        while done.finish == "abort":
            rest = replace(
                request, prompt=request.prompt + done.tokens, max_tokens=request.max_tokens - len(done.tokens)
            )
            more = await self._generate(rest)
            if more.finish == "abort" and self.pauses == pauses:
                raise CouplerError("a rollout cut a request off without a pause.\n  look at:  the rollout's log")
            done, pauses = _continued(done, more), self.pauses
        return done

    async def _generate(self, request: Request) -> Completion:
        """Sample one completion, with the routes of its tokens if these were asked for.

        Raises:
            CouplerError: there are none, or it is none that :class:`Completion` describes.
        """
        done = await self._sample(request)
        if done.finish not in FINISHES:
            raise CouplerError(
                f"a rollout ended a request with {done.finish!r}, which is none of {', '.join(FINISHES)}.\n"
                "  look at:  the rollout's log"
            )
        if not len(done.tokens) == len(done.logprobs) == len(done.versions):
            raise CouplerError(
                f"a rollout returned {len(done.logprobs)} log-probs and {len(done.versions)} versions of "
                f"{len(done.tokens)} tokens.\n  look at:  the rollout's log"
            )
        if request.routed_experts and done.routed_experts is None:
            raise CouplerError(
                "the rollout was asked which experts its tokens went to, and did not say.\n"
                "  try:  router_replay=R2, which does not ask it"
            )
        return done

    async def _sample(self, request: Request) -> Completion:
        """Sample on one replica, and on another if that one dies: nothing of a dead one's is used."""
        while True:
            index = self._route(request)
            cost = len(request.prompt) + request.max_tokens
            self.outstanding[index] += cost
            answer = None
            try:
                answer = await self._call(index, "generate", request)
            finally:
                self.outstanding[index] -= cost
            if not isinstance(answer, ReplicaDied):
                return replace(answer, replica=index)
            if not self._living():
                raise answer

    def keeps_whole(self, groups: int) -> bool:
        """Whether so many equal groups of requests load the replicas evenly enough with each group on one of them."""
        count = len(self.replicas)
        return -(-groups // count) * count <= FULLER * groups

    def end(self, session: str) -> None:
        """Forget where a session was: no request of it follows."""
        self.sessions.pop(session, None)

    def _route(self, request: Request) -> int:
        kept = self.sessions.get(request.session) if request.session else None
        if kept is not None and kept not in self.dead:
            return kept
        living = self._living()
        if not living:
            raise self._extinct()
        lightest = min(living, key=self.outstanding.__getitem__)
        if request.session:
            self.sessions[request.session] = lightest
        return lightest
