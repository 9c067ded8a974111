"""Sample held-out prompts and average their rewards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from coupler.conversation.measures import describe_parts
from coupler.conversation.packing import Sample
from coupler.data import Prompt
from coupler.interfaces import Request
from coupler.loop.sampler import Scorer
from coupler.metrics import Metric, Metrics, merge
from coupler.system.seeding import derive

RESAMPLES, SUBSETS = 1000, 64


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Scores the current weights of the rollouts on fixed prompts."""

    scorer: Scorer
    prompts: Sequence[Prompt]
    samples_per_prompt: int
    request: Request
    seed: int

    async def run(self) -> tuple[Metrics, list[Sample]]:
        """Return rewards over all prompts, and the scored episodes.

        Where rows name several values of ``data_source``, each has metrics of its own.
        A completion without a valid reward counts as 0, because leaving it out would
        flatter the mean.
        """
        n, count = self.samples_per_prompt, len(self.prompts)
        seeds = [[derive(self.seed, "eval", i, j) for j in range(n)] for i in range(count)]
        groups = await asyncio.gather(
            *(
                self.scorer.sample(prompt, mine, self.request, groups=count)
                for prompt, mine in zip(self.prompts, seeds, strict=True)
            )
        )
        metrics = {f"eval/{name}": metric for name, metric in _describe(groups, n).items()}

        sources = [prompt.row.data_source for prompt in self.prompts]
        for source in sorted(set(sources)) if len(set(sources)) > 1 else ():
            mine = [group for group, its in zip(groups, sources, strict=True) if its == source]
            for name, metric in _describe(mine, n).items():
                metrics[f"eval/{source or 'other'}/{name}"] = metric

        scored = [sample for group in groups for sample in group]
        played = merge(sample.metrics for sample in scored) | describe_parts(scored)
        metrics |= {f"eval/{name}": played[name] for name in played if name[:5] != "time/"}
        return metrics, scored


def _describe(groups: Sequence[Sequence[Sample]], n: int) -> Metrics:
    """Return metrics of prompts with ``n`` samples each, some of them invalid."""
    rewards = np.array([[s.reward for s in g] + [0.0] * (n - len(g)) for g in groups])
    scored = [s for group in groups for s in group]
    count = max(len(scored), 1)

    per_prompt = {"reward": rewards.mean(1)}
    sizes = sorted({*(1 << i for i in range(1, n.bit_length()) if 1 << i < n), n} - {1})
    per_prompt |= {f"best_of_{k}": best_of(rewards, k) for k in sizes}
    if sizes and scored and all(s.answer is not None for s in scored):
        for k in sizes:
            subsets = _subsets(n, k)
            per_prompt[f"majority_of_{k}"] = np.array([_majority_of(g, subsets) for g in groups])

    metrics = {name: Metric(float(each.sum()), len(each)) for name, each in per_prompt.items()}
    draws = resampled(len(groups))
    for name, each in per_prompt.items():
        low, high = interval(each, draws)
        metrics |= {f"{name}_low": Metric(low), f"{name}_high": Metric(high)}
    return metrics | {
        "completion_tokens": Metric(sum(s.num_sampled for s in scored), count),
        "truncated": Metric(sum(s.truncated for s in scored), count),
    }


def best_of(rewards: np.ndarray, k: int) -> np.ndarray:
    """Return the expected best reward of ``k`` of a prompt's samples.

    Where rewards are 0 and 1 it is the unbiased estimate of pass@k (equation 1 of arXiv
    2107.03374).

    Args:
        rewards: one row per prompt [prompts, n], with n at least ``k``.
    """
    n = rewards.shape[1]
    # The sample of rank i is the best of those k that it forms with k - 1 lower ones.
    weights = np.array([comb(i, k - 1) for i in range(n)], float) / comb(n, k)
    return np.sort(rewards, axis=1) @ weights


def resampled(size: int) -> np.ndarray:
    """Return [resamples, size] the prompts of each resample, the same at every call."""
    return np.random.default_rng(0).integers(size, size=(RESAMPLES, size))


def interval(per_prompt: np.ndarray, draws: np.ndarray) -> tuple[float, float]:
    """Return the bounds of 95 % for the mean over prompts, by the bootstrap of
    percentiles.

    Args:
        draws: the prompts of each resample, of :func:`resampled`.
    """
    low, high = np.quantile(per_prompt[draws].mean(1), (0.025, 0.975))
    return float(low), float(high)


def _subsets(n: int, k: int) -> list[list[int]]:
    """Return all of ``n`` samples if ``k`` is ``n``, and else subsets of ``k`` of them,
    drawn by a fixed seed.
    """
    if k == n:
        return [[*range(n)]]
    order = np.random.default_rng(0)
    return [sorted(order.permutation(n)[:k].tolist()) for _ in range(SUBSETS)]


def _majority_of(group: Sequence[Sample], subsets: Sequence[Sequence[int]]) -> float:
    """Return the mean over subsets of the reward of the most frequent answer. Invalid
    samples, which the group lacks, do not vote.
    """
    each = [_of_majority([group[i] for i in subset if i < len(group)]) for subset in subsets]
    return float(np.mean(each))


def _of_majority(group: Sequence[Sample]) -> float:
    """Return the reward of the most frequent answer, or 0 if no sample is valid.

    Of several answers that are equally frequent, the first one counts.
    """
    votes = Counter(s.answer for s in group)
    return next((s.reward for s in group if votes[s.answer] == max(votes.values())), 0.0)
