"""Run the reinforcement-learning loop, synchronous or asynchronous by
``max_staleness`` alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import numpy as np

from coupler.batch import Batch
from coupler.batch.columns import of_policy
from coupler.config.schema import RunConfig
from coupler.conversation.measures import describe, describe_trained
from coupler.conversation.packing import joined
from coupler.errors import CouplerError, WeightSyncError
from coupler.interfaces import Algorithm, ShardingManager, StepResult
from coupler.loop.buffer import Buffer
from coupler.loop.completing import Completing, Provider, complete
from coupler.loop.device_memory import GENERATING, Held, Residency
from coupler.loop.engine_group import EngineGroup
from coupler.loop.sampler import Sampler
from coupler.loop.state import State
from coupler.loop.step_metrics import Clock, of_role, reproducible
from coupler.loop.sync_answer import answer_of
from coupler.loop.turns import Turn, turns_of
from coupler.metrics import Metrics, merge

# gets the number and the metrics of a finished step
OnStep = Callable[[int, Metrics], Awaitable[None]]
# keeps the batch of a step and the metrics of training on it
Record = Callable[[int, Batch, Metrics], None]
# judges a step by metrics of the engine, those of the sampler, and its prompt groups
Judge = Callable[[Metrics, Metrics, int], Metrics]
TRAINED = frozenset({Held.PARAMS, Held.GRADS, Held.OPTIMIZER})


class Trainer:
    """Runs ``sample -> complete -> train -> sync`` for ``config.steps`` steps.

    The Sampler fills the Buffer at its own pace, and a step takes
    ``prompts_per_step`` groups out of it.

    Args:
        parts: of a step, which engines complete one by one as they are sampled.
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
        judge: Judge,
        parts: int = 1,
    ) -> None:
        self.config, self.policy, self.weights, self.algorithm = config, policy, weights, algorithm
        self.sampler, self.buffer = sampler, buffer
        self.residency, self.record, self.judge = residency, record, judge
        self.critic = critic
        self.complete = partial(complete, config=config, algorithm=algorithm, providers=providers)
        self.parts = parts

        self.skips = {
            role: SkippedSteps(config.max_skipped_steps, role) for role in ("policy", "critic")
        }
        self.controller = algorithm.controller()

    async def fit(self, on_step: OnStep, done: int = 0) -> None:
        """Train the steps after ``done``, and give the metrics of each to ``on_step``.

        Nothing is in flight then at staleness 0. An error that ends the run early is
        raised after everything in flight was cancelled.
        """
        metrics = await answer_of(self.weights, "prove", done)
        if not done:
            await on_step(0, metrics)

        # the first requests come at once
        async with self.residency("sample", GENERATING):
            sampling = asyncio.create_task(self.sampler.run())
        try:
            for step in range(done + 1, self.config.steps + 1):
                await on_step(step, await self.step(step))
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)

    async def step(self, step: int) -> Metrics:
        """Train step number ``step``, and return its metrics."""
        clock = Clock()
        completing = Completing(self.complete)
        try:
            async with clock("time/sample"), self.residency("sample", GENERATING):
                # not in the step before, so that nothing runs at a checkpoint
                await self.buffer.advance(step - 1)
                async for groups in self.buffer.take(self.parts):
                    part = joined(groups)
                    check_versions(of_policy(part), step - 1, self.config.max_staleness)
                    completing.begin(part)
            async with clock("time/complete"):
                whole = await completing.whole()
                batch, controlled = self.control(whole)
        finally:
            await completing.close()
        async with clock("time/train"):
            trained = await self.train(batch, step)
        self.record(step, batch, trained)

        sampled = self.sampler.metrics()
        z = self.judge(trained, sampled, len(np.unique(batch["group"])))
        verified = self.weights.check(trained)
        synced = await answer_of(self.weights, "sync", step)
        # the batch was sampled before the last sync, so it cannot verify it
        if not verified:
            synced |= await answer_of(self.weights, "probe")
        trained = reproducible(trained, verified)
        return {
            **sampled,
            **describe(whole, step - 1, self.config.max_staleness),
            **describe_trained(batch),
            **controlled,
            **trained,
            **z,
            **synced,
            **clock.metrics(batch),
        }

    def state(self) -> State:
        """Return the state of the run between two steps."""
        plain = {
            "buffer": self.buffer.state(),
            "sampler": self.sampler.state(),
            "skipped": {role: skips.in_a_row for role, skips in self.skips.items()},
            "controller": self.controller.state() if self.controller else None,
        }
        return State(plain, dict(self.buffer.ready))

    def restore(self, state: State, *, reset_data: bool = False) -> None:
        """Go on from ``state``, with ``reset_data`` from the start of the data."""
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
        """Return whether the last gradient of every role was finite."""
        return not any(skips.in_a_row for skips in self.skips.values())

    def control(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Add advantages under the controller's coefficient of this step, then let the
        controller learn the next one.
        """
        if self.controller is None:
            return self.algorithm.advantages(batch), {}
        batch = self.controller.apply(batch)
        return self.algorithm.advantages(batch), self.controller.update(batch)

    async def train(self, batch: Batch, step: int) -> Metrics:
        """Train every role whose turn it is, side by side where memory allows.

        Raises:
            CouplerError: too many optimizer steps in a row had a non-finite gradient.
        """
        groups = {group.spec.role: group for group in (self.policy, self.critic) if group}
        turns = turns_of(self.config, groups, step, batch, self.weights.version)
        trained = (self.train_role(groups[role], turn) for role, turn in turns.items())
        return merge(await asyncio.gather(*trained))

    async def train_role(self, group: EngineGroup, turn: Turn) -> Metrics:
        """Train one role, and count the steps that it skipped."""
        role = group.spec.role
        phase = "train" if role == "policy" else f"train_{role}"
        async with self.residency(phase, {role: TRAINED}):
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
                f"the {self.role}'s gradient was not finite in {self.in_a_row} optimizer "
                "steps in a row; none of them was applied.\n"
                f"  try:  a smaller {engine}.lr, {engine}.dtype=fp32, or look for a NaN in "
                "the rewards; the limit is max_skipped_steps"
            )


def check_versions(batch: Batch, version: int, max_staleness: int) -> None:
    """Check that sampled tokens name versions that rollouts can have held.

    Raises:
        WeightSyncError: a token is of a later version than ``version``, or of an older
            one than admission allows.
    """
    sampled = batch["version"][batch["loss_mask"]]
    named = sampled if len(sampled) else np.array([version])
    oldest, newest = int(named.min()), int(named.max())
    if newest > version or oldest < version - max_staleness:
        raise WeightSyncError(
            f"the rollouts hold weights version {version}, and sampled tokens name versions "
            f"{oldest} to {newest}, with max_staleness={max_staleness}.\n"
            "  this means:  the rollout names wrong versions, or a sync sent it nothing; these "
            "numbers cannot tell which\n"
            "  look at:  Completion.versions of the rollout, and sync() of sync.manager"
        )
