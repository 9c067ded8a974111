"""Score a greedy episode of each prompt, for algorithms that compare with it."""

from __future__ import annotations

from dataclasses import replace

from coupler.conversation.episodes import together
from coupler.conversation.packing import Sample
from coupler.data import Prompt
from coupler.errors import CouplerError
from coupler.interfaces import Request
from coupler.loop.sampler import Scorer


class GreedyScorer(Scorer):
    """Give each sample of a prompt the reward of the prompt's greedy episode.

    That episode costs one request per turn, counts among the calls of the reward, and
    is not trained on. Where its reward is invalid, the prompt has no samples.
    """

    def __init__(self, scorer: Scorer) -> None:
        super().__init__(
            scorer.rollouts,
            scorer.rewards,
            scorer.codec,
            scorer.episodes,
        )
        self.names = scorer.names

    async def sample(
        self, prompt: Prompt, seeds: list[int], request: Request, *, groups: int
    ) -> list[Sample]:
        if self.rewards.takes_group:
            raise CouplerError(
                "the algorithm compares with a greedy episode that is scored by itself, and "
                "reward.target scores all completions of a prompt together.\n"
                "  try:  a reward with the argument completion, or another algorithm"
            )
        greedy = replace(
            request,
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            routed_experts=False,
        )

        sampled, compared = await together(
            [
                super().sample(prompt, seeds, request, groups=groups),
                super().sample(prompt, seeds[:1], greedy, groups=groups),
            ]
        )
        return [
            replace(sample, greedy_reward=found.reward) for found in compared for sample in sampled
        ]
