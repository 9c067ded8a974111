"""Trainer: the reinforcement-learning loop, once. ``max_staleness`` is all that tells synchronous from asynchronous."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import numpy as np

from coupler.batch import Batch
from coupler.buffer import Buffer
from coupler.checkpoint import State
from coupler.config.schema import RunConfig
from coupler.errors import CouplerError
from coupler.interfaces import Algorithm, StepResult
from coupler.metrics import Metric, Metrics
from coupler.record import Recorder
from coupler.residency import Held, Residency
from coupler.sampling import Sampler
from coupler.sharding import StreamShardingManager
from coupler.workers import WorkerGroup

Provider = Callable[[Batch], Awaitable[np.ndarray]]  # computes one [T] float32 column
OnStep = Callable[[int, Metrics], Awaitable[None]]

GENERATING = {"rollout": frozenset({Held.WEIGHTS, Held.KV_CACHE})}
TRAINING = {"policy": frozenset({Held.PARAMS, Held.GRADS, Held.OPTIMIZER})}
SYNCING = {"policy": frozenset({Held.PARAMS}), "rollout": frozenset({Held.WEIGHTS})}
PROVING = {"policy": frozenset({Held.PARAMS}), "rollout": frozenset({Held.WEIGHTS, Held.KV_CACHE})}


class Trainer:
    """Runs ``sample -> complete -> train -> sync`` for ``config.steps`` steps.

    The Sampler fills the Buffer at its own pace; a step takes ``prompts_per_step`` groups out of it.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        policy: WorkerGroup,
        weights: StreamShardingManager,
        algorithm: Algorithm,
        sampler: Sampler,
        buffer: Buffer,
        providers: Mapping[str, Provider],
        residency: Residency,
        recorder: Recorder,
    ) -> None:
        self.config, self.policy, self.weights, self.algorithm = config, policy, weights, algorithm
        self.sampler, self.buffer, self.providers = sampler, buffer, providers
        self.residency, self.recorder = residency, recorder
        self.skips = SkippedSteps(config.max_skipped_steps)

    async def fit(self, on_step: OnStep, done: int = 0) -> None:
        """Train the steps after ``done``; ``on_step`` gets the metrics of each, with nothing in flight at staleness 0.

        Raises what ended the run early, after everything in flight was cancelled.
        """
        async with self.residency("prove", PROVING):
            metrics = await self.weights.prove(done)
        if not done:
            await on_step(0, metrics)
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
        async with clock("time/complete"):
            batch = self.algorithm.advantages(await self.complete(batch))
        async with clock("time/train"), self.residency("train", TRAINING):
            trained = await self.policy.train(batch, self.config.optimizer_steps_per_batch, self.weights.version)
        self.recorder.write(step, batch, {**trained.metrics, **of_steps(trained.steps)})
        self.weights.check(trained.metrics)
        self.skips.count(trained.steps)
        async with self.residency("sync", SYNCING):
            synced = await self.weights.sync(step)
        return {
            **self.sampler.metrics(),
            **describe(batch, step - 1, self.config.max_staleness),
            **trained.metrics,
            **of_steps(trained.steps),
            **synced,
            **clock.metrics(batch),
        }

    def state(self) -> State:
        """Where the run stands; between two steps."""
        counters = {"buffer": self.buffer.state(), "sampler": self.sampler.state(), "skipped": self.skips.in_a_row}
        return State(counters, dict(self.buffer.ready))

    def restore(self, state: State, *, reset_data: bool = False) -> None:
        """Go on from ``state``; ``reset_data`` draws prompts from the start of other data."""
        self.buffer.restore(state.plain["buffer"], state.groups)
        self.sampler.restore(state.plain["sampler"], reset_data=reset_data)
        self.skips.in_a_row = state.plain["skipped"]

    async def complete(self, batch: Batch) -> Batch:
        """Add every column that the algorithm needs."""
        for column in sorted(self.algorithm.needs & self.providers.keys()):
            batch = batch.with_tokens(**{column: await self.providers[column](batch)})
        return batch


class Clock:
    """Seconds per phase of one step."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @asynccontextmanager
    async def __call__(self, name: str) -> AsyncIterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start

    def metrics(self, batch: Batch) -> Metrics:
        total = time.perf_counter() - self.start
        return {
            **{name: Metric(seconds, how="sum") for name, seconds in self.seconds.items()},
            "time/step": Metric(total, how="sum"),
            "time/tokens_per_second": Metric(batch.num_tokens / total),
        }


class SkippedSteps:
    """Stops a run whose gradient stays non-finite."""

    def __init__(self, limit: int) -> None:
        self.limit, self.in_a_row = limit, 0

    def count(self, steps: tuple[StepResult, ...]) -> None:
        """Count skipped steps.

        Raises:
            CouplerError: more than ``limit`` in a row.
        """
        for step in steps:
            self.in_a_row = 0 if step.applied else self.in_a_row + 1
        if self.in_a_row > self.limit:
            raise CouplerError(
                f"the gradient was not finite in {self.in_a_row} optimizer steps in a row; none of them was applied.\n"
                "  try:  a smaller engine.lr, engine.dtype=fp32, or look for a NaN in the rewards; "
                "the limit is max_skipped_steps"
            )


def of_steps(steps: tuple[StepResult, ...]) -> Metrics:
    """The metrics of optimizer steps."""
    finite = [s.grad_norm for s in steps if s.applied]
    return {
        "train/grad_norm": Metric(sum(finite), len(finite)),
        "train/lr": Metric(sum(s.lr for s in steps), len(steps)),
        "train/skipped_steps": Metric(float(sum(not s.applied for s in steps)), how="sum"),
    }


def describe(batch: Batch, version: int, max_staleness: int) -> Metrics:
    """What a step trains on. ``staleness`` is in weight versions, per sampled token."""
    mask = batch["loss_mask"]
    age = (version - batch["version"])[mask]
    reward, valid = batch["reward"].astype(np.float64), batch.sum_by_sequence(mask)
    return {
        "reward/mean": Metric(float(reward.sum()), len(batch)),
        "reward/max": Metric(float(reward.max()), how="max"),
        "reward/min": Metric(float(reward.min()), how="min"),
        "batch/sequences": Metric(len(batch), how="sum"),
        "batch/tokens": Metric(batch.num_tokens, how="sum"),
        "batch/completion_tokens": Metric(float(valid.sum()), len(batch)),
        "batch/truncated": Metric(float(batch["truncated"].sum()), len(batch)),
        "staleness/mean": Metric(float(age.sum()), max(len(age), 1)),
        "staleness/max": Metric(float(age.max(initial=0)), how="max"),
        "staleness/violations": Metric(float((age > max_staleness).sum()), how="sum"),
    }
