"""Trainer: the reinforcement-learning loop, once. ``max_staleness`` is all that tells synchronous from asynchronous."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from coupler.batch import Batch
from coupler.batch.columns import ROUTED_EXPERTS
from coupler.config.schema import RunConfig
from coupler.errors import CouplerError, WeightSyncError
from coupler.interfaces import Algorithm, StepResult
from coupler.loop.buffer import Buffer
from coupler.loop.device_memory import GENERATING, Held, Residency
from coupler.loop.sampler import Sampler
from coupler.loop.weight_sync import StreamShardingManager
from coupler.metrics import Metric, Metrics, merge
from coupler.run.checkpoint import State
from coupler.run.step_record import Recorder
from coupler.worker.worker import OF_REPLICA, Trained, WorkerGroup

Provider = Callable[[Batch], Awaitable[Mapping[str, np.ndarray]]]  # computes token columns, by their names
OnStep = Callable[[int, Metrics], Awaitable[None]]

TRAINED = frozenset({Held.PARAMS, Held.GRADS, Held.OPTIMIZER})


class Trainer:
    """Runs ``sample -> complete -> train -> sync`` for ``config.steps`` steps.

    The Sampler fills the Buffer at its own pace; a step takes ``prompts_per_step`` groups out of it.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        policy: WorkerGroup,
        critic: WorkerGroup | None = None,
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
        self.recorder.write(step, batch, trained)
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

    async def train_role(self, group: WorkerGroup, turn: Turn) -> Metrics:
        role = group.spec.role
        async with self.residency("train" if role == "policy" else f"train_{role}", {role: TRAINED}):
            trained = await group.train(turn.batch, turn.num_steps, turn.version, turn.epochs)
        self.skips[role].count(trained.steps)
        return of_role(role, trained)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one role trains on in one step: arguments of :meth:`WorkerGroup.train`."""

    batch: Batch
    num_steps: int
    version: int | None
    epochs: int


def turns_of(config: RunConfig, roles: Collection[str], step: int, batch: Batch, version: int) -> dict[str, Turn]:
    """The turns of the trained ``roles`` at ``step``, whose batch the weights of ``version`` train on."""
    turns = {}
    if step > warmup_steps(config, "critic" in roles):
        turns["policy"] = Turn(batch, config.optimizer_steps_per_batch, version, config.epochs_per_batch)
    if "critic" in roles:  # it has no version: nothing samples from it
        judged = batch.without(ROUTED_EXPERTS)
        turns["critic"] = Turn(judged, critic_steps_per_batch(config), None, config.epochs_per_batch)
    return turns


def optimizer_steps(config: RunConfig, has_critic: bool) -> dict[str, int]:
    """How many each trained role takes over the whole run."""
    batches, epochs = config.steps - warmup_steps(config, has_critic), config.epochs_per_batch
    critic = {"critic": config.steps * critic_steps_per_batch(config) * epochs} if has_critic else {}
    return {"policy": max(batches, 0) * config.optimizer_steps_per_batch * epochs, **critic}


def critic_steps_per_batch(config: RunConfig) -> int:
    """Optimizer steps that the critic takes in each epoch of a batch."""
    return config.critic.optimizer_steps_per_batch or config.optimizer_steps_per_batch


def warmup_steps(config: RunConfig, has_critic: bool) -> int:
    """How many first steps train the critic only."""
    return config.critic.warmup_steps if has_critic else 0


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
            **{f"{name}_per_1k_tokens": Metric(1000 * s / batch.num_tokens) for name, s in self.seconds.items()},
        }


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


def of_role(role: str, trained: Trained) -> Metrics:
    """The metrics of training ``role``; the critic's are ``critic/...``."""
    metrics = {**trained.metrics, **of_steps(trained.steps)}
    if role == "policy":
        return metrics
    return {f"{role}/{name.removeprefix('train/')}": metric for name, metric in metrics.items()}


def of_steps(steps: tuple[StepResult, ...]) -> Metrics:
    """The metrics of optimizer steps."""
    finite = [s.grad_norm for s in steps if s.applied]
    return {
        "train/grad_norm": Metric(sum(finite), len(finite)),
        "train/lr": Metric(sum(s.lr for s in steps), len(steps)),
        "train/skipped_steps": Metric(float(sum(not s.applied for s in steps)), how="sum"),
    }


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


def describe(batch: Batch, version: int, max_staleness: int) -> Metrics:
    """What a step trains on. ``staleness`` is in weight versions, per sampled token."""
    mask = batch["loss_mask"]
    judged = describe_values(batch["values"][mask], batch["returns"][mask]) if batch.has("values", "returns") else {}
    judged |= describe_advantages(batch["advantages"][mask]) if batch.has("advantages") else {}
    age = (version - batch["version"])[mask]
    reward, valid = batch["reward"].astype(np.float64), batch.sum_by_sequence(mask)
    return {
        "reward/mean": Metric(float(reward.sum()), len(batch)),
        "reward/max": Metric(float(reward.max()), how="max"),
        "reward/min": Metric(float(reward.min()), how="min"),
        "batch/sequences": Metric(len(batch), how="sum"),
        "batch/tokens": Metric(batch.num_tokens, how="sum"),
        "batch/prompt_tokens": Metric(batch.num_tokens - float(valid.sum()), len(batch)),
        "batch/completion_tokens": Metric(float(valid.sum()), len(batch)),
        "batch/completion_tokens_max": Metric(float(valid.max(initial=0)), how="max"),
        "batch/truncated": Metric(float(batch["truncated"].sum()), len(batch)),
        "staleness/mean": Metric(float(age.sum()), max(len(age), 1)),
        "staleness/max": Metric(float(age.max(initial=0)), how="max"),
        "staleness/violations": Metric(float((age > max_staleness).sum()), how="sum"),
        **judged,
    }


def describe_advantages(advantages: np.ndarray) -> Metrics:
    """Of valid tokens, [n]."""
    advantages = advantages.astype(np.float64)
    return (
        {
            "advantages/mean": Metric(float(advantages.sum()), len(advantages)),
            "advantages/abs": Metric(float(abs(advantages).sum()), len(advantages)),
            "advantages/max": Metric(float(advantages.max(initial=-np.inf)), how="max"),
            "advantages/min": Metric(float(advantages.min(initial=np.inf)), how="min"),
        }
        if len(advantages)
        else {}
    )


def describe_values(values: np.ndarray, returns: np.ndarray) -> Metrics:
    """How good the critic was before it trained: [n] its values and the returns that came, on valid tokens.

    ``critic/explained_variance`` is ``1 - var(returns - values) / var(returns)``: 1 is perfect, 0 as good as the mean.
    """
    values, returns = values.astype(np.float64), returns.astype(np.float64)
    spread = float(returns.var()) if len(returns) else 0.0
    explained = 1 - float((returns - values).var()) / spread if spread else 0.0
    return {
        "critic/values": Metric(float(values.sum()), len(values)),
        "critic/returns": Metric(float(returns.sum()), len(returns)),
        "critic/explained_variance": Metric(explained),
    }
