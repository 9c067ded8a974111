"""Evaluation: sample held-out prompts and average their rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coupler.data import Prompt
from coupler.metrics import Metric, Metrics
from coupler.sampling import Scored, Scorer
from coupler.seeding import derive


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Scores the current weights of the rollouts on fixed prompts."""

    scorer: Scorer
    prompts: Sequence[Prompt]
    samples_per_prompt: int
    max_tokens: int
    temperature: float
    top_p: float
    seed: int

    async def run(self) -> tuple[Metrics, list[Scored]]:
        """Mean and best-of-n reward over all prompts, and every scored completion.

        A completion without a valid reward counts as 0 here: leaving it out would flatter the mean.
        """
        n = self.samples_per_prompt
        seeds = [[derive(self.seed, "eval", i, j) for j in range(n)] for i in range(len(self.prompts))]
        groups = await asyncio.gather(
            *(
                self.scorer.sample(prompt, mine, self.max_tokens, self.temperature, top_p=self.top_p)
                for prompt, mine in zip(self.prompts, seeds, strict=True)
            )
        )
        rewards = [np.array([s.reward for s in group] + [0.0] * (n - len(group))) for group in groups]
        scored = [s for group in groups for s in group]
        metrics = {
            "eval/reward": Metric(float(sum(r.mean() for r in rewards)), len(rewards)),
            "eval/completion_tokens": Metric(sum(len(s.completion.tokens) for s in scored), max(len(scored), 1)),
            "eval/truncated": Metric(sum(s.completion.finish == "length" for s in scored), max(len(scored), 1)),
        }
        if n > 1:
            metrics[f"eval/best_of_{n}"] = Metric(float(sum(r.max() for r in rewards)), len(rewards))
        return metrics, scored
