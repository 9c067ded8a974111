"""Trainer: the reinforcement-learning loop, once. ``max_staleness`` is all that tells synchronous from asynchronous."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import numpy as np

from coupler.batch import Batch
from coupler.config.schema import RunConfig
from coupler.errors import CouplerError, WeightSyncError
from coupler.interfaces import Algorithm, ShardingManager, StepResult
from coupler.loop.buffer import Buffer
from coupler.loop.device_memory import GENERATING, Held, Residency
from coupler.loop.engine_group import EngineGroup
from coupler.loop.sampler import Sampler
from coupler.loop.state import State
from coupler.loop.step_metrics import Clock, describe, of_role
from coupler.loop.turns import Turn, turns_of
from coupler.metrics import Metrics, merge
from coupler.worker.train_infer import OF_REPLICA

Provider = Callable[[Batch], Awaitable[Mapping[str, np.ndarray]]]  # computes token columns, by their names
OnStep = Callable[[int, Metrics], Awaitable[None]]
Record = Callable[[int, Batch, Metrics], None]  # keeps the batch of a step and what training gave
TRAINED = frozenset({Held.PARAMS, Held.GRADS, Held.OPTIMIZER})


class Trainer:
    """Runs ``sample -> complete -> train -> sync`` for ``config.steps`` steps.

    The Sampler fills the Buffer at its own pace; a step takes ``prompts_per_step`` groups out of it.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        policy: EngineGroup,
        critic: EngineGroup | None = None,
        weights: ShardingManager,
        algorithm: Algorithm,
        sampler: Sampler,
        buffer: Buffer,
        providers: Mapping[str, Provider],
        residency: Residency,
        record: Record,
    ) -> None:
        self.config, self.policy, self.weights, self.algorithm = config, policy, weights, algorithm
        self.sampler, self.buffer, self.providers = sampler, buffer, providers
        self.residency, self.record = residency, record
        self.critic = critic
        self.skips = {role: SkippedSteps(config.max_skipped_steps, role) for role in ("policy", "critic")}
        self.controller = algorithm.controller()

    async def fit(self, on_step: OnStep, done: int = 0) -> None:
        """Train the steps after ``done``; ``on_step`` gets the metrics of each, with nothing in flight at staleness 0.

        Raises what ended the run early, after everything in flight was cancelled.
        """
        metrics = await self.weights.prove(done)
        if not done:
            await on_step(0, metrics)
        async with self.residency("sample", GENERATING):  # the first requests come at once
            sampling = asyncio.create_task(self.sampler.run())
        try:
            for step in range(done + 1, self.config.steps + 1):
                await on_step(step, await self.step(step))
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)

    async def step(self, step: int) -> Metrics:
        clock = Clock()
        async with clock("time/sample"), self.residency("sample", GENERATING):
            await self.buffer.advance(step - 1)  # here, so that nothing is under way while a checkpoint is made
            batch = Batch.concat(await self.buffer.take())
            check_versions(batch, step - 1, self.config.max_staleness)
        async with clock("time/complete"):
            batch, controlled = self.control(await self.complete(batch))
        async with clock("time/train"):
            trained = await self.train(batch, step)
        self.record(step, batch, trained)
        judged = self.weights.check(trained)
        synced = await self.weights.sync(step)
        if not judged:  # the batch is older than the last sync: it says nothing of any
            synced |= await self.weights.probe()
        unsaid = OF_REPLICA if judged else "train_infer/"  # who sampled what depends on who was faster
        trained = {name: metric for name, metric in trained.items() if not name.startswith(unsaid)}
        return {
            **self.sampler.metrics(),
            **describe(batch, step - 1, self.config.max_staleness),
            **controlled,
            **trained,
            **synced,
            **clock.metrics(batch),
        }

    def state(self) -> State:
        """Where the run stands; between two steps."""
        plain = {
            "buffer": self.buffer.state(),
            "sampler": self.sampler.state(),
            "skipped": {role: skips.in_a_row for role, skips in self.skips.items()},
            "controller": self.controller.state() if self.controller else None,
        }
        return State(plain, dict(self.buffer.ready))

    def restore(self, state: State, *, reset_data: bool = False) -> None:
        """Go on from ``state``; ``reset_data`` draws prompts from the start of other data."""
        self.buffer.restore(state.plain["buffer"], state.groups)
        self.sampler.restore(state.plain["sampler"], reset_data=reset_data)
        for role, skips in self.skips.items():
            skips.in_a_row = state.plain["skipped"][role]
        if self.controller:
            self.controller.restore(state.plain["controller"])

    def start_at(self, step: int) -> None:
        """Begin after ``step`` of another run, whose weights the engines hold."""
        self.buffer.start_at(step)

    @property
    def healthy(self) -> bool:
        """Whether the last gradient of every role was finite."""
        return not any(skips.in_a_row for skips in self.skips.values())

    async def complete(self, batch: Batch) -> Batch:
        """Add every column that the algorithm needs; roles compute theirs side by side where memory allows."""
        names = sorted(self.algorithm.needs & self.providers.keys())
        found = await asyncio.gather(*(self.providers[name](batch) for name in names))
        return batch.with_tokens(**{name: column for columns in found for name, column in columns.items()})

    def control(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Add advantages, under the controller's coefficient of this step; it then learns the next one's."""
        if self.controller is None:
            return self.algorithm.advantages(batch), {}
        batch = self.controller.apply(batch)
        return self.algorithm.advantages(batch), self.controller.update(batch)

    async def train(self, batch: Batch, step: int) -> Metrics:
        """Train every role whose turn it is, side by side where memory allows; the critic's metrics are ``critic/...``.

        Raises:
            CouplerError: too many optimizer steps in a row had a non-finite gradient.
        """
        groups = {group.spec.role: group for group in (self.policy, self.critic) if group}
        turns = turns_of(self.config, groups, step, batch, self.weights.version)
        return merge(await asyncio.gather(*(self.train_role(groups[role], turn) for role, turn in turns.items())))

    async def train_role(self, group: EngineGroup, turn: Turn) -> Metrics:
        role = group.spec.role
        async with self.residency("train" if role == "policy" else f"train_{role}", {role: TRAINED}):
            trained = await group.train(turn.batch, turn.num_steps, turn.version, turn.epochs)
        self.skips[role].count(trained.steps)
        return of_role(role, trained)


class SkippedSteps:
    """Stops a run whose gradient stays non-finite."""

    def __init__(self, limit: int, role: str = "policy") -> None:
        self.limit, self.role, self.in_a_row = limit, role, 0

    def count(self, steps: tuple[StepResult, ...]) -> None:
        """Count skipped steps.

        Raises:
            CouplerError: more than ``limit`` in a row.
        """
        for step in steps:
            self.in_a_row = 0 if step.applied else self.in_a_row + 1
        if self.in_a_row > self.limit:
            engine = "engine" if self.role == "policy" else f"{self.role}.engine"
            raise CouplerError(
                f"the {self.role}'s gradient was not finite in {self.in_a_row} optimizer steps in a row; "
                "none of them was applied.\n"
                f"  try:  a smaller {engine}.lr, {engine}.dtype=fp32, or look for a NaN in the rewards; "
                "the limit is max_skipped_steps"
            )


def check_versions(batch: Batch, version: int, max_staleness: int) -> None:
    """Hold the versions that rollouts name against what they can have had while ``version`` is the last one.

    Raises:
        WeightSyncError: a token is of a later version, or of an older one than admission allows.
    """
    sampled = batch["version"][batch["loss_mask"]]
    oldest, newest = (int(sampled.min()), int(sampled.max())) if len(sampled) else (version, version)
    if newest > version or oldest < version - max_staleness:
        raise WeightSyncError(
            f"the rollouts hold weights version {version}, and sampled tokens name versions {oldest} to {newest}, "
            f"with max_staleness={max_staleness}.\n  look at:  Completion.versions of the rollout"
        )
