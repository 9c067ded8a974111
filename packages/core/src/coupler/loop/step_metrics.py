"""Measure one step: its times, its optimizer steps, and what a replay repeats."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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


def reproducible(trained: Metrics, verified: bool) -> Metrics:
    """Leave out the metrics that depend on which replica was faster.

    These are the differences of each replica, and all differences if they verify no
    sync.
    """
    left_out = (OF_REPLICA if verified else "train_infer/", SURPRISE_OF, VARIANCE_OF, *SUMS)
    return {name: metric for name, metric in trained.items() if not name.startswith(left_out)}
