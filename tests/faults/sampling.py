"""Runs whose rollouts sample from the distribution they report, or from another one.

Each case is a run of the statistic behind ``sync.max_sampling_z`` over simulated steps.
Honest runs have flat, peaked or nearly certain distributions, steps of a few tokens or
of thousands, and one replica or several. The others hide a top-p, top-k, min-p, penalty
or temperature. A case comes through if an honest run is stopped, or if a hidden change
is not found within the tokens of a window.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from tests.faults import run

from coupler.errors import WeightSyncError
from coupler.metrics import Metrics
from coupler.run.sampling_check import WINDOW, SamplingCheck
from coupler.worker.train_infer import surprise

LIMIT = 8.0  # of sync.max_sampling_z
STEPS = 25
WIDTHS = {"even": 0.01, "flat": 0.3, "soft": 1.0, "common": 2.5, "peaked": 8.0, "extreme": 25.0}
TWO_LEVELS = {"rare": (0.5, 0.99999), "sure": (0.99, 1 - 1e-9), "ending": (0.3, 0.999)}
HIDDEN = {
    "top_p": (0.8, 0.9, 0.95),
    "top_k": (5, 20),
    "min_p": (0.03, 0.05, 0.1),
    "penalty": (0.3, 1.0),
    "temperature": (0.8, 0.95, 1.05, 1.2),
}
VOCABULARY = 300


def check(seed: int, cases: int) -> Iterator[str]:
    """Yield the runs that were judged wrong."""
    random = np.random.default_rng(seed)
    for number in range(cases):
        if number % 2:
            how = str(random.choice(list(HIDDEN)))
            value = float(random.choice(HIDDEN[how]))
            width = float(random.uniform(1.5, 3.0))
            if not stops(hidden(random, how, value, width) for _ in range(WINDOW // 4000)):
                yield f"{how}={value} at logits of width {width:.2f} was not found"
        else:
            kind = str(random.choice([*WIDTHS, *TWO_LEVELS]))
            most, replicas = int(random.choice([20, 200, 2000])), int(random.choice([1, 2, 8]))
            if said := stops(honest(random, kind, most, replicas) for _ in range(STEPS)):
                yield f"honest {kind}, up to {most} tokens, {replicas} replicas: {said}"


def stops(steps: Iterator[Metrics]) -> str:
    """Return the sentence that stops a run of these steps, empty if none does."""
    judge = SamplingCheck(LIMIT)
    try:
        for step in steps:
            judge.judge(step, {}, 4)
    except WeightSyncError as error:
        return str(error)
    return ""


def honest(random: np.random.Generator, kind: str, most: int, replicas: int) -> Metrics:
    """Return metrics of a step that is sampled as it is reported."""
    count = int(random.integers(max(1, most // 4), most))
    if kind in WIDTHS:
        return drawn(random, WIDTHS[kind], count, replicas, lambda log_p: log_p)

    likely = random.uniform(*TWO_LEVELS[kind], count)
    others = np.log1p(-likely) - np.log(random.integers(10, 150_000))
    hit = random.random(count) < likely
    entropy = -likely * np.log(likely) - (1 - likely) * others
    return measured(random, np.where(hit, np.log(likely), others), entropy, replicas)


def hidden(random: np.random.Generator, how: str, value: float, width: float) -> Metrics:
    """Return metrics of a step that is sampled otherwise than it is reported."""

    def altered(log_p: np.ndarray) -> np.ndarray:
        order = np.sort(log_p, -1)[:, ::-1]
        if how == "top_p":
            mass = np.exp(order).cumsum(-1)
            last = (mass < value).sum(-1)
            return np.where(log_p >= order[np.arange(len(order)), last][:, None], log_p, -np.inf)
        if how == "top_k":
            return np.where(log_p >= order[:, [int(value) - 1]], log_p, -np.inf)
        if how == "min_p":
            return np.where(log_p >= order[:, :1] + np.log(value), log_p, -np.inf)
        if how == "penalty":
            return np.where(log_p >= order[:, [10]], log_p - value, log_p)
        return log_p / value

    return drawn(random, width, 4000, 1, altered)


def drawn(
    random: np.random.Generator, width: float, count: int, replicas: int, altered: object
) -> Metrics:
    """Draw tokens at random positions, of distributions with logits of ``width``."""
    assert callable(altered)
    logits = random.normal(0, width, (32, VOCABULARY))
    top = logits.max(-1, keepdims=True)
    log_p = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    p = np.exp(altered(log_p))
    sums = (p / p.sum(-1, keepdims=True)).cumsum(-1)

    row = random.integers(0, 32, count)
    token = (sums[row] < random.random(count)[:, None]).sum(-1).clip(0, VOCABULARY - 1)
    entropy = -(np.exp(log_p) * log_p).sum(-1)
    return measured(random, log_p[row, token], entropy[row], replicas)


def measured(
    random: np.random.Generator, logprobs: np.ndarray, entropy: np.ndarray, replicas: int
) -> Metrics:
    """Return what an engine measures on such tokens, in float32."""
    count = len(logprobs)
    batch = {
        "rollout_logprobs": logprobs,
        "loss_mask": np.ones(count, bool),
        "version": np.zeros(count, np.int32),
        "seq": np.arange(count),
        "replica": random.integers(0, replicas, count),
    }
    out = {"logprobs": logprobs.astype(np.float32), "entropy": entropy.astype(np.float32)}
    return surprise(out, batch, 0, replicas)


if __name__ == "__main__":
    run(check, 400)
