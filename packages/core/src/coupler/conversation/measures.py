"""Measure episodes and the batches that are made of them: rewards, lengths, advantages
and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coupler.batch import Batch
from coupler.batch.columns import of_policy
from coupler.conversation.packing import PARTS, Sample
from coupler.metrics import Metric, Metrics, merge


def describe_samples(samples: Sequence[Sample], group: Batch, kept: bool) -> Metrics:
    """Return metrics of the samples of a prompt, which the algorithm kept or not.

    Those of the policy count no demonstration.
    """
    shown = [sample for sample in samples if sample.demonstration]
    found = {"sampled/rejected_groups": Metric(float(not kept), how="sum")}
    if shown:
        found |= {
            "demonstrations/rows": Metric(len(shown), how="sum"),
            "demonstrations/tokens": Metric(_tokens_of(shown), how="sum"),
            "demonstrations/reward": Metric(sum(sample.reward for sample in shown), len(shown)),
        }

    samples = [sample for sample in samples if not sample.demonstration]
    return found | _of_policy(samples, of_policy(group)["reward"]) if samples else found


def _tokens_of(shown: Sequence[Sample]) -> int:
    return sum(
        len(done.tokens) for sample in shown for row in sample.rows for done in row.completions
    )


def _of_policy(samples: Sequence[Sample], rewards: np.ndarray) -> Metrics:
    size, sampled = len(samples), sum(sample.num_sampled for sample in samples)

    return {
        **merge(sample.metrics for sample in samples),
        **describe_parts(samples),
        "sampled/tokens": Metric(sampled, how="sum"),
        "sampled/completion_tokens": Metric(sampled, size),
        "sampled/truncated": Metric(sum(sample.truncated for sample in samples), size),
        "sampled/reward": Metric(sum(sample.reward for sample in samples), size),
        "sampled/equal_reward_groups": Metric(float(rewards.max() == rewards.min()), 1),
    }


def describe_parts(samples: Sequence[Sample]) -> Metrics:
    """Return the mean of each number of which rewards are made, NaN left out."""
    return merge(
        {f"{PARTS}/{n}": Metric(number) for n, number in sample.parts.items() if number == number}
        for sample in samples
    )


def describe(batch: Batch, version: int, max_staleness: int) -> Metrics:
    """Describe the batch of a step. ``staleness`` is in versions per sampled token.

    Rewards and lengths are of trajectories, which may have several rows. Demonstrations
    do not count. A batch of these alone has no metrics.
    """
    batch = of_policy(batch)
    if not len(batch):
        return {}

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
