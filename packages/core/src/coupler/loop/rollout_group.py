"""Let the controller see the replicas of an inference backend as one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from coupler.batch.batch import concat
from coupler.errors import CouplerError, ReplicaDied
from coupler.executors import Executor
from coupler.interfaces import (
    Completion,
    Finish,
    InFlight,
    Memory,
    Rank,
    Request,
    SyncReceipt,
    WeightUpdate,
)
from coupler.loop.routing import Router
from coupler.system.log import get_logger
from coupler.system.seeding import derive
from coupler.worker.replica import RolloutSpec

log = get_logger(__name__)

REPLICA = "coupler.worker.replica:build"
FINISHES = get_args(Finish)
# A replica that dies more often in a run has a cause that no restart mends.
MAX_RESTARTS = 3


def _joined(first: Any, rest: Any) -> Any:
    """Join the routes of the two parts of a completion that was cut off.

    The tokens that were fed while the first part was sampled keep their routes. A part
    that was cut off before anything was fed has none.
    """
    if first is None or rest is None:
        return rest if first is None else first

    fed = first.max(axis=(1, 2), keepdims=True) >= 0
    whole = rest.copy()
    whole[: len(first)] = np.where(fed, first, rest[: len(first)])
    return whole


def _continued(done: Completion, more: Completion) -> Completion:
    """Join a completion that was cut off with the one that continued it."""
    masks = [part.sampling_mask for part in (done, more) if part.sampling_mask is not None]
    return Completion(
        done.tokens + more.tokens,
        done.logprobs + more.logprobs,
        done.versions + more.versions,
        more.finish,
        _joined(done.routed_experts, more.routed_experts),
        concat(masks) if masks else None,
        more.replica,
    )


def _holds_all(mask: Any, tokens: tuple[int, ...]) -> bool:
    """Return whether every token is in its row of a sampling mask."""
    if mask is None or len(mask) != len(tokens):
        return not tokens
    return bool((mask == np.array(tokens, int)[:, None]).any(1).all())


def _checked(request: Request, done: Completion) -> Completion:
    """Return a rollout's answer, with the routes and masks that were asked for.

    Raises:
        CouplerError: it is not what :class:`Completion` describes, or routes or masks
            are missing.
    """
    if done.finish not in FINISHES:
        raise CouplerError(
            f"a rollout ended a request with {done.finish!r}, which is none of "
            f"{', '.join(FINISHES)}.\n  look at:  the rollout's log"
        )
    if not len(done.tokens) == len(done.logprobs) == len(done.versions):
        raise CouplerError(
            f"a rollout returned {len(done.logprobs)} log-probs and {len(done.versions)} "
            f"versions of {len(done.tokens)} tokens.\n  look at:  the rollout's log"
        )
    if request.routed_experts and done.routed_experts is None and done.tokens:
        raise CouplerError(
            "the rollout was asked which experts its tokens went to, and did not say.\n"
            "  try:  router_replay=R2, which does not ask it"
        )
    if request.top_k and not _holds_all(done.sampling_mask, done.tokens):
        raise CouplerError(
            "the rollout was asked which ids it sampled each token among, and the token is "
            "not always one of them.\n"
            "  look at:  Completion.sampling_mask\n"
            "  try:  sampling.top_k=0 sampling.top_p=1, which does not ask it"
        )
    return done


class RolloutGroup:
    """Shares requests among replicas, as its :class:`Router` chooses.

    Requests of a dead replica go to another one. :meth:`revive` starts it again, in
    time for the next weights.
    """

    def __init__(
        self, executor: Executor, spec: RolloutSpec, ranks: list[Rank], role: str = "rollout"
    ) -> None:
        self.executor, self.ranks = executor, ranks
        self.replicas = [
            executor.spawn(role, rank.index, REPLICA, spec, spec.config.python) for rank in ranks
        ]

        self.num_workers = [0] * len(ranks)
        self.router = Router(len(ranks))
        self.restarts = [0] * len(ranks)
        self.dead: set[int] = set()
        # how the last dead replica ended
        self.cause = ""
        self.pauses, self.paused = 0, False

    @property
    def num_receivers(self) -> int:
        """Model workers over all living replicas."""
        return sum(self.num_workers[i] for i in self._living())

    def _living(self) -> list[int]:
        return [i for i in range(len(self.replicas)) if i not in self.dead]

    async def prepare(self) -> None:
        """Start the processes of every replica, without memory of a device."""
        await self._each("prepare")

    async def setup(self) -> None:
        """Start every replica."""
        self.num_workers = await self._each("setup")

    async def _each(self, method: str) -> list[Any]:
        """Call a method of every replica, which is rank 0 of a world of its own."""
        self.ranks = await self.executor.locate(self.replicas, self.ranks)
        alone = [(self._alone(i),) for i in range(len(self.ranks))]
        return await self.executor.each(self.replicas, method, alone)

    def _alone(self, index: int) -> Rank:
        return replace(self.ranks[index], index=0, world=1, rendezvous="")

    async def all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every living replica, and return one result each.

        Raises:
            ReplicaDied: no replica lives any more.
        """
        answers = await self.tell(method, *args)
        if not answers:
            raise self._extinct()
        return answers

    async def tell(self, method: str, *args: Any) -> list[Any]:
        """Call a method as :meth:`all` does, without an error if every replica is dead.

        The next pause starts dead replicas again.
        """
        answers = await asyncio.gather(*(self._call(i, method, *args) for i in self._living()))
        return [answer for answer in answers if not isinstance(answer, ReplicaDied)]

    def _extinct(self) -> ReplicaDied:
        return ReplicaDied(f"no rollout replica is left: {self.cause}")

    async def _call(self, index: int, method: str, *args: Any) -> Any:
        """Return a replica's answer, or the error with which it died."""
        try:
            return await self.executor.call(self.replicas[index], method, *args)
        except ReplicaDied as error:
            self.dead.add(index)
            self.cause = str(error)
            return error

    async def update(self, update: WeightUpdate) -> list[SyncReceipt]:
        """Bring weights to every living replica.

        Raises:
            ReplicaDied: a replica died. No replica is being updated any more, and some
                may hold half of the weights.
        """
        self.router.forget_caches()
        running = [asyncio.ensure_future(self._update(i, update)) for i in self._living()]
        try:
            await asyncio.wait(running)
        finally:
            for task in running:
                task.cancel()

        failed = [error for task in running if (error := task.exception())]
        # a replica's death is the cause of every other failure
        for error in sorted(failed, key=lambda error: not isinstance(error, ReplicaDied)):
            raise error
        return [task.result() for task in running]

    async def _update(self, index: int, update: WeightUpdate) -> SyncReceipt:
        answer = await self._call(index, "update", update)
        if isinstance(answer, ReplicaDied):
            await asyncio.to_thread(update.open().call_off, update, self.num_workers[index])
            raise answer
        return answer

    async def pause(self, in_flight: InFlight) -> None:
        """Pause every living replica, and leave dead ones to :meth:`revive`."""
        self.pauses, self.paused = self.pauses + 1, True
        await self.tell("pause", in_flight)

    async def resume(self) -> None:
        """Let every living replica sample again."""
        self.paused = False
        await self.tell("resume")

    async def holds_base(self) -> bool:
        """Return whether every living replica holds the weights beneath an adapter."""
        return all(await self.all("holds_base"))

    async def sample_on_each(self, request: Request) -> list[Completion]:
        """Sample one completion on every living replica."""
        return [_checked(request, done) for done in await self.all("generate", request)]

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
        """Start dead replicas again, paused like the others and without weights.

        Raises:
            ReplicaDied: a replica was started ``MAX_RESTARTS`` times already.
        """
        while self.dead:
            index = min(self.dead)
            self.restarts[index] += 1
            if self.restarts[index] > MAX_RESTARTS:
                raise ReplicaDied(
                    f"rollout replica {index} died {self.restarts[index]} times.\n"
                    "  look at:  the log of this replica"
                )

            log.info(f"rollout replica {index} died; starting it again")
            self.replicas[index] = await self.executor.revive(self.replicas[index])
            workers = await self._call(index, "setup", self._alone(index))
            if not isinstance(workers, ReplicaDied):
                self.num_workers[index] = workers
                self.dead.discard(index)
                await self._call(index, "pause", in_flight)

    async def generate(self, request: Request) -> Completion:
        """Sample one completion, and continue it where a pause cut it off.

        Raises:
            CouplerError: a request was cut off without a pause.
            ReplicaDied: no replica lives.
        """
        done, pauses = await self._sample(request), self.pauses
        while done.finish == "abort":
            rest = replace(
                request,
                prompt=request.prompt + done.tokens,
                max_tokens=request.max_tokens - len(done.tokens),
                # the random numbers of the first part would favour its tokens again
                seed=derive(request.seed, "continued", len(done.tokens)),
            )
            more = await self._sample(rest)

            if more.finish == "abort" and self.pauses == pauses:
                raise CouplerError(
                    "a rollout cut a request off without a pause.\n  look at:  the rollout's log"
                )
            done, pauses = _continued(done, more), self.pauses
        return done

    async def _sample(self, request: Request) -> Completion:
        """Sample on one replica, and from the start on another one if that one dies."""
        while True:
            living = self._living()
            if not living:
                raise self._extinct()
            index, cost = self.router.start(request, living)
            try:
                answer = await self._call(index, "generate", request)
            except BaseException:
                self.router.finish(request, index, cost, None)
                raise
            self.router.finish(request, index, cost, answer)

            if not isinstance(answer, ReplicaDied):
                return replace(_checked(request, answer), replica=index)
            if not self._living():
                raise answer
