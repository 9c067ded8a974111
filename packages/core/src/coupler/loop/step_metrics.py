"""Measure one step: its times, rewards, lengths, advantages and values."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from coupler.batch import Batch
from coupler.interfaces import StepResult
from coupler.metrics import Metric, Metrics
from coupler.worker.spec import Trained
from coupler.worker.train_infer import OF_REPLICA, SURPRISE_OF, VARIANCE_OF

# only SamplingCheck reads these
SUMS = ("sampling/square_max", "sampling/entropy", "sampling/kl", "sampling/variance")


class Clock:
    """A stopwatch for the phases of one step."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @asynccontextmanager
    async def __call__(self, name: str) -> AsyncIterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start

    def metrics(self, batch: Batch) -> Metrics:
        """Return seconds per phase and step, also per 1,000 tokens of ``batch``."""
        total = time.perf_counter() - self.start
        return {
            **{name: Metric(seconds, how="sum") for name, seconds in self.seconds.items()},
            "time/step": Metric(total, how="sum"),
            "time/tokens_per_second": Metric(batch.num_tokens / total),
            **{
                f"{name}_per_1k_tokens": Metric(1000 * s / batch.num_tokens)
                for name, s in self.seconds.items()
            },
        }


def of_role(role: str, trained: Trained) -> Metrics:
    """Return the metrics of training ``role``, the critic's as ``critic/...``."""
    metrics = {**trained.metrics, **of_steps(trained.steps)}
    if role == "policy":
        return metrics
    return {f"{role}/{name.removeprefix('train/')}": metric for name, metric in metrics.items()}


def of_steps(steps: tuple[StepResult, ...]) -> Metrics:
    """Return the metrics of optimizer steps."""
    finite = [s.grad_norm for s in steps if s.applied]
    return {
        "train/grad_norm": Metric(sum(finite), len(finite)),
        "train/lr": Metric(sum(s.lr for s in steps), len(steps)),
        "train/skipped_steps": Metric(float(sum(not s.applied for s in steps)), how="sum"),
    }


def describe(batch: Batch, version: int, max_staleness: int) -> Metrics:
    """Describe the batch of a step. ``staleness`` is in versions per sampled token.

    Rewards and lengths are of trajectories, which may have several rows.
    """
    mask = batch["loss_mask"]
    age = (version - batch["version"])[mask]
    first, of_row = batch.trajectories()
    size, reward = len(first), batch["reward"][first].astype(np.float64)
    valid = np.bincount(of_row, batch.sum_by_sequence(mask))

    return {
        "reward/mean": Metric(float(reward.sum()), size),
        "reward/max": Metric(float(reward.max()), how="max"),
        "reward/min": Metric(float(reward.min()), how="min"),
        "batch/sequences": Metric(len(batch), how="sum"),
        "batch/trajectories": Metric(size, how="sum"),
        "batch/tokens": Metric(batch.num_tokens, how="sum"),
        "batch/prompt_tokens": Metric(batch.num_tokens - float(valid.sum()), size),
        "batch/completion_tokens": Metric(float(valid.sum()), size),
        "batch/completion_tokens_max": Metric(float(valid.max(initial=0)), how="max"),
        "batch/truncated": Metric(float(batch["truncated"][first].sum()), size),
        "staleness/mean": Metric(float(age.sum()), max(len(age), 1)),
        "staleness/max": Metric(float(age.max(initial=0)), how="max"),
        "staleness/violations": Metric(float((age > max_staleness).sum()), how="sum"),
    }


def describe_trained(batch: Batch) -> Metrics:
    """Describe what the algorithm made of a batch, which may leave out trajectories."""
    mask = batch["loss_mask"]
    judged: Metrics = {}
    if batch.has("values", "returns"):
        judged |= describe_values(batch["values"][mask], batch["returns"][mask])
    if batch.has("advantages"):
        judged |= describe_advantages(batch["advantages"][mask])
    return judged


def describe_advantages(advantages: np.ndarray) -> Metrics:
    """Describe the advantages [n] of valid tokens."""
    if not len(advantages):
        return {}
    advantages = advantages.astype(np.float64)
    return {
        "advantages/mean": Metric(float(advantages.sum()), len(advantages)),
        "advantages/abs": Metric(float(abs(advantages).sum()), len(advantages)),
        "advantages/max": Metric(float(advantages.max()), how="max"),
        "advantages/min": Metric(float(advantages.min()), how="min"),
    }


def describe_values(values: np.ndarray, returns: np.ndarray) -> Metrics:
    """Compare the critic's values [n], before it trained, with the returns [n].

    ``critic/explained_variance`` is ``1 - var(returns - values) / var(returns)``. It is
    1 for a perfect critic, and 0 for one that is as good as the mean.
    """
    values, returns = values.astype(np.float64), returns.astype(np.float64)
    spread = float(returns.var()) if len(returns) else 0.0
    explained = 1 - float((returns - values).var()) / spread if spread else 0.0
    return {
        "critic/values": Metric(float(values.sum()), len(values)),
        "critic/returns": Metric(float(returns.sum()), len(returns)),
        "critic/explained_variance": Metric(explained),
    }


def reproducible(trained: Metrics, verified: bool) -> Metrics:
    """Leave out the metrics that depend on which replica was faster.

    These are the differences of each replica, and all differences if they verify no
    sync.
    """
    left_out = (OF_REPLICA if verified else "train_infer/", SURPRISE_OF, VARIANCE_OF, *SUMS)
    return {name: metric for name, metric in trained.items() if not name.startswith(left_out)}
