"""Sample held-out prompts and average their rewards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coupler.conversation.packing import Sample, describe_parts
from coupler.data import Prompt
from coupler.interfaces import Request
from coupler.loop.sampler import Scorer
from coupler.metrics import Metric, Metrics, merge
from coupler.system.seeding import derive


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
    rewards = [np.array([s.reward for s in group] + [0.0] * (n - len(group))) for group in groups]
    scored = [s for group in groups for s in group]
    count = max(len(scored), 1)
    metrics = {
        "reward": Metric(float(sum(r.mean() for r in rewards)), len(rewards)),
        "completion_tokens": Metric(sum(s.num_sampled for s in scored), count),
        "truncated": Metric(sum(s.truncated for s in scored), count),
    }

    if n > 1:
        metrics[f"best_of_{n}"] = Metric(float(sum(r.max() for r in rewards)), len(rewards))
        if scored and all(s.answer is not None for s in scored):
            metrics[f"majority_of_{n}"] = Metric(sum(map(_of_majority, groups)), len(groups))
    return metrics


def _of_majority(group: Sequence[Sample]) -> float:
    """Return the reward of the most frequent answer, or 0 if no sample is valid.

    Of several answers that are equally frequent, the first one counts.
    """
    votes = Counter(s.answer for s in group)
    return next((s.reward for s in group if votes[s.answer] == max(votes.values())), 0.0)
