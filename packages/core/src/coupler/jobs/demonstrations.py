"""Show the answers of rows in the place of what the policy would sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nextafter

import numpy as np

from coupler.batch.columns import DEMONSTRATION
from coupler.batch.trajectory import Trajectory
from coupler.conversation.episodes import Played
from coupler.conversation.packing import GREEDY, Sample
from coupler.conversation.tree import Row
from coupler.data import Prompt
from coupler.data.examples import imitated
from coupler.errors import DataError
from coupler.interfaces import Algorithm, Completion, Outcome, Request
from coupler.jobs.build import Builder
from coupler.loop.sampler import Scorer
from coupler.system.reads import original
from coupler.system.seeding import stream

# The smallest and the largest draw of a prompt group.
DRAWS = (0.0, nextafter(1.0, 0.0))


def find_answers(builder: Builder, prompts: Sequence[Prompt]) -> dict[int, Trajectory]:
    """Encode the answers that may be shown, by the numbers of their rows.

    They are encoded as supervised training encodes them, each with its prompt.

    Raises:
        DataError: an answer is empty, or longer than a completion may be.
    """
    algorithm, config = builder.algorithm, original(builder.config)
    if DEMONSTRATION not in algorithm.needs:
        return {}

    found: dict[int, Trajectory] = {}
    for row in (prompt.row for prompt in prompts):
        if not _may_show(algorithm, row.data_source, config.samples_per_prompt):
            continue
        found[row.index] = imitated(row, builder.codec, config.data)
        size, limit = len(found[row.index].segments[-1].ids), config.sampling.max_tokens
        if size > limit:
            raise DataError(
                f"{row.place(config.data.named)} has an answer of {size} tokens to learn from, "
                f"and sampling.max_tokens={limit}.\n"
                f"  try:  sampling.max_tokens={size}, or leaving the row out"
            )
    return found


def _may_show(algorithm: Algorithm, source: str, samples: int) -> bool:
    return any(algorithm.num_sampled(source, samples, draw) < samples for draw in DRAWS)


class DemonstratingScorer(Scorer):
    """Gives prompts the answers of their rows, where the algorithm asks for them.

    An answer counts among the calls of the reward, as a sample does.

    Args:
        scorer: samples and scores the others.
        answers: the examples of rows, by their numbers.
    """

    def __init__(
        self, scorer: Scorer, algorithm: Algorithm, answers: Mapping[int, Trajectory]
    ) -> None:
        super().__init__(
            scorer.rollouts,
            scorer.rewards,
            scorer.codec,
            scorer.episodes,
        )
        self.inner, self.algorithm, self.answers = scorer, algorithm, answers

    async def sample(
        self, prompt: Prompt, seeds: list[int], request: Request, *, groups: int
    ) -> list[Sample]:
        """Return the samples of the policy, and behind them the answer of the row.

        A sample that nothing is left to compare with is left out.
        """
        draw = float(stream(seeds[0], DEMONSTRATION).random())
        source = prompt.row.data_source
        count = self.algorithm.num_sampled(source, len(seeds), draw)
        if count == len(seeds):
            return await self.inner.sample(prompt, seeds, request, groups=groups)

        sampled: list[Sample] = []
        if count:
            sampled = await self.inner.sample(prompt, seeds[:count], request, groups=groups)
        if len(sampled) < min(2, count):
            sampled = []
        return [*sampled, *await self._shown(prompt, request)]

    async def _shown(self, prompt: Prompt, request: Request) -> list[Sample]:
        """Return the answer of a row as a sample, unless its reward is invalid."""
        row = row_of(self.answers[prompt.row.index], masked=request.top_k > 0)
        played = Played((row,), Outcome(), row.completions[-1].finish, {})
        with self.rollouts.executor.waits.named("prompts", "rewards", [prompt.row.index]):
            scored = await self._score(prompt, played)

        sample = self._sample(prompt, played, scored)
        if sample is None:
            return []
        greedy = sample.reward if GREEDY in self.algorithm.needs else None
        return [replace(sample, demonstration=True, greedy_reward=greedy)]


def row_of(answer: Trajectory, *, masked: bool) -> Row:
    """Return the row of a demonstration, whose tokens have no version.

    Args:
        masked: whether samples have the ids that they were sampled among. All ids are
            left to the tokens of an answer.
    """
    tokens = answer.segments[-1].ids
    size = len(tokens)
    done = Completion(
        tokens,
        (0.0,) * size,
        (-1,) * size,
        "stop",
        sampling_mask=np.full((size, 1), -1, np.int32) if masked else None,
    )
    return Row(answer, (done,), ())
