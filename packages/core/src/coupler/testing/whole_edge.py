"""Build one edge for the kit: the toy engine, two toy replicas that fail when told, and
the manager between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from coupler.config.schema import SyncConfig
from coupler.errors import ReplicaDied
from coupler.executors import Local
from coupler.executors.waits import Waits
from coupler.interfaces import (
    Completion,
    InFlight,
    Model,
    Output,
    Rank,
    Request,
    ShardingManager,
    SyncReceipt,
    WeightUpdate,
)
from coupler.loop.engine_group import EngineGroup
from coupler.loop.rollout_group import RolloutGroup
from coupler.plugins.backend import Backend
from coupler.testing.reference import as_batch
from coupler.testing.subject import Subject
from coupler.testing.toy import ToyRollout
from coupler.testing.toy_config import ToyEngineConfig, ToyRolloutConfig
from coupler.worker.replica import RolloutSpec
from coupler.worker.spec import WorkerSpec

NUM_REPLICAS = 2
DEADLINE_S = 10.0  # for each thing that a test waits for
PROMPT = (7, 8, 9)

T = TypeVar("T")


class FaultyRollout(ToyRollout):
    """Die or lie when a test says so, and count what a sync must not do.

    Attributes:
        deaths: updates that it dies of before it takes one.
        dies_sampling: it dies of the next request.
        lie: fields of its receipts that are not true.
        starts: how often it was set up.
        sampled_meanwhile: how often it was seen sampling during an update.
    """

    deaths = 0
    dies_sampling = False
    lie: dict[str, Any] = {}  # noqa: RUF012 - replaced, never written into
    starts = 0
    sampled_meanwhile = 0

    async def setup(self, rank: Rank) -> int:
        self.starts += 1
        return await super().setup(rank)

    async def generate(self, request: Request) -> Completion:
        if self.dies_sampling:
            self.dies_sampling = False
            raise ReplicaDied("the kit let this replica die while it sampled.")
        return await super().generate(request)

    async def update(self, update: WeightUpdate) -> SyncReceipt:
        if self.deaths:
            self.deaths -= 1
            raise ReplicaDied("the kit let this replica die of an update.")
        await self._watch()
        # Receiving blocks, and senders may wait for both replicas: each has a thread.
        receipt = await asyncio.to_thread(lambda: asyncio.run(ToyRollout.update(self, update)))
        await self._watch()
        return replace(receipt, **self.lie)

    async def _watch(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)
            self.sampled_meanwhile += self.active > 0 and self.samples.is_set()


class Turns:
    """Take device turns, and remember whose turn it is."""

    def __init__(self) -> None:
        self.now = ""

    def syncing(self, phase: str) -> AbstractAsyncContextManager[None]:
        """Take the turn ``syncing``."""
        return self._turn("syncing")

    def generating(self, phase: str) -> AbstractAsyncContextManager[None]:
        """Take the turn ``generating``."""
        return self._turn("generating")

    @asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        assert not self.now, (
            f"turn {name} was asked for within turn {self.now}: "
            "on shared devices that waits forever"
        )
        self.now = name
        try:
            yield
        finally:
            self.now = ""


class WatchedGroup(RolloutGroup):
    """Remember in whose turn the replicas got weights."""

    turns: Turns
    updated_in: list[str]

    async def update(self, update: WeightUpdate) -> list[SyncReceipt]:
        self.updated_in.append(self.turns.now)
        return await super().update(update)


class WholeEdge:
    """Hold an engine, two replicas and the manager under test, in one process."""

    def __init__(
        self,
        sharding: Subject,
        transport: Backend,
        folder: Path,
        in_flight: InFlight = InFlight.DRAIN,
    ) -> None:
        model, here = Model(str(folder)), f"{__name__}:{FaultyRollout.__name__}"
        spec = WorkerSpec("policy", "coupler.testing.toy:ToyEngine", ToyEngineConfig(), model, None)
        ranks = [Rank(index=i, world=NUM_REPLICAS, seed=i) for i in range(NUM_REPLICAS)]

        self.executor = Local(inline=True, waits=Waits(DEADLINE_S, 10 * DEADLINE_S))
        self.engine = EngineGroup(self.executor, spec, [Rank()])
        replicas = RolloutSpec(here, ToyRolloutConfig(replicas=NUM_REPLICAS), model)
        self.rollouts = WatchedGroup(self.executor, replicas, ranks)
        self.rollouts.turns, self.rollouts.updated_in = Turns(), []
        self.random = np.random.default_rng(0)
        self.manager: ShardingManager = sharding.backend.load()(
            SyncConfig(deadline_s=DEADLINE_S),
            engine=self.engine,
            rollouts=self.rollouts,
            weight_format="full",
            transport=transport.target,
            probe_prompt=PROMPT,
            temperature=1.0,
            residency=self.rollouts.turns,
            in_flight=in_flight,
        )

    @property
    def replicas(self) -> list[FaultyRollout]:
        return [handle.of for handle in self.rollouts.replicas]

    async def start(self, version: int = 0) -> None:
        """Do what a trainer does before its first step."""
        await self.engine.setup()
        await within(self.manager.setup(), "setup()")
        await within(self.manager.prove(version), f"prove({version})")

    async def sync(self, version: int) -> None:
        await within(self.manager.sync(version), f"sync({version})")

    def train(self) -> None:
        """Change every weight of the engine by so much that no tensor that is missed
        can hide.
        """
        params = self.engine.ranks[0].of.engine.params
        for tensor in params.values():
            tensor += self.random.normal(0, 0.5, tensor.shape)

    async def compare(self, version: int) -> None:
        """Fail unless every replica lives, says ``version`` and runs the engine's
        weights.
        """
        said = self.manager.version
        assert said == version, f"expected manager.version == {version} after the sync, came {said}"
        assert not self.rollouts.dead, (
            f"expected every replica alive after the sync, dead are {self.rollouts.dead}"
        )
        request = Request(PROMPT, 24, 1.0, (), seed=version)
        sampling = self.rollouts.sample_on_each(request)
        sampled = await within(
            sampling, f"a completion after version {version}: were the rollouts resumed?"
        )

        for replica, done in enumerate(sampled):
            batch = as_batch(request.prompt, done.tokens, request.temperature)
            ours = (await self.engine.forward(batch, (Output("logprobs"),)))["logprobs"][
                len(PROMPT) :
            ]
            off = float(np.abs(ours - np.array(done.logprobs)).max())
            assert off < 1e-3, (
                f"expected replica {replica} to run the engine's weights of version {version}; "
                f"its log-probs are off by up to {off:.3f}"
            )
            versions = set(done.versions)
            assert versions == {version}, (
                f"expected tokens of replica {replica} at version {version}, came {versions}"
            )

    def close(self) -> None:
        self.executor.close()


async def within(work: Awaitable[T], what: str) -> T:
    """Wait for ``work``, and fail with its name where it takes too long."""
    try:
        async with asyncio.timeout(
            2 * DEADLINE_S if what.startswith(("sync", "prove")) else DEADLINE_S / 2
        ):
            return await work
    except TimeoutError:
        raise AssertionError(f"expected {what}; nothing came in time") from None
