"""Turn prompts into scored groups in the Buffer, continuously.

Generation and rewards of all prompts overlap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import astuple, replace
from itertools import count
from typing import Any

from coupler.conversation.episodes import Played, Plays, together
from coupler.conversation.measures import describe_samples
from coupler.conversation.packing import Sample, pack, with_needed
from coupler.data import Codec, Prompt, PromptStream
from coupler.interfaces import Algorithm, Request
from coupler.loop.buffer import Buffer
from coupler.loop.rollout_group import RolloutGroup
from coupler.metrics import Metric, Metrics, merge, read
from coupler.rewards import Invalid, Scored, judged
from coupler.rewards.opinions import Episode, Rewards
from coupler.system.seeding import derive


class Scorer:
    """Plays episodes of a prompt and scores each, for training and evaluation."""

    def __init__(
        self, rollouts: RolloutGroup, rewards: Rewards, codec: Codec, episodes: Plays
    ) -> None:
        self.rollouts, self.rewards, self.codec = rollouts, rewards, codec
        self.episodes = episodes
        self.names = count()

    async def sample(
        self, prompt: Prompt, seeds: list[int], request: Request, *, groups: int
    ) -> list[Sample]:
        """Return one scored episode per seed, without those of invalid rewards.

        The reward pool counts the invalid ones.

        Args:
            request: what is asked for, but for prompt, stop tokens, seed and session.
            groups: calls that run side by side, this one included. If they are enough
                to load all replicas evenly, a call's completions come from one replica,
                which computes the prompt once.
        """
        return await self.episodes.whole(lambda: self._group(prompt, seeds, request, groups))

    async def _group(
        self, prompt: Prompt, seeds: list[int], request: Request, groups: int
    ) -> list[Sample]:
        router, session = self.rollouts.router, ""
        if router.keeps_whole(groups):
            session = f"group {next(self.names)}"
            router.begin(session)
        # The turns of one episode go to one replica too, while that is not overloaded.
        sessions = [session or f"episode {next(self.names)}" for _ in seeds]
        requests = (
            replace(request, seed=s, session=n) for s, n in zip(seeds, sessions, strict=True)
        )
        play = self._play if self.rewards.takes_group else self._one

        try:
            played = await together(play(prompt, one) for one in requests)
            found = [one for one in played if one]
        finally:
            for name in sessions:
                router.end(name)
        scored = [one for one in found if isinstance(one, Sample)]
        return scored or await self._score_together(
            prompt, [one for one in found if isinstance(one, Played)]
        )

    async def _one(self, prompt: Prompt, request: Request) -> Sample | None:
        played = await self._play(prompt, request)
        if not played:
            return None
        with self.rollouts.executor.waits.named("prompts", "rewards", [prompt.row.index]):
            scored = self._own(played) or await self._score(prompt, played)
        return self._sample(prompt, played, scored)

    async def _score(self, prompt: Prompt, played: Played) -> Scored:
        return (await self.rewards.score([self._episode(played)], prompt))[0]

    async def _play(self, prompt: Prompt, request: Request) -> Played | None:
        """Play an episode. One without a word of the policy is counted as invalid."""
        with self.rollouts.executor.waits.named("prompts", "completions", [prompt.row.index]):
            played = await self.episodes.play(prompt, request)
        if played.rows:
            return played
        self.rewards.count(judged(None, played.outcome.invalid))
        return None

    async def _score_together(self, prompt: Prompt, played: list[Played]) -> list[Sample]:
        """Score all episodes of a prompt by one call of the reward."""
        found = [self._own(one) for one in played]
        pairs = list(zip(played, found, strict=True))
        asked = [self._episode(one) for one, own in pairs if not own]

        with self.rollouts.executor.waits.named("prompts", "rewards", [prompt.row.index]):
            scored = iter(await self.rewards.score(asked, prompt))
        made = [self._sample(prompt, one, own or next(scored)) for one, own in pairs]
        return [sample for sample in made if sample]

    def _own(self, played: Played) -> Scored | None:
        """Return the reward that the episode gave itself, counted, if it did."""
        outcome = played.outcome
        if outcome.reward is None and not outcome.invalid:
            return None
        scored = judged(outcome.reward, outcome.invalid)
        self.rewards.count(scored)
        return scored

    def _episode(self, played: Played) -> Episode:
        """Return the text to score, and the conversation."""
        answer = played.outcome.answer
        said = self._text(played) if answer is None else answer
        return Episode(said, played.rows[-1].messages)

    def _text(self, played: Played) -> str:
        return self.codec.decode(played.rows[-1].completions[-1].tokens)

    def _sample(self, prompt: Prompt, played: Played, scored: Scored) -> Sample | None:
        if isinstance(scored.result, Invalid):
            return None
        facts = (self._text(played), played.finish, scored.answer, played.outcome.turn_rewards)
        about = (scored.parts, scored.opinions)
        return Sample(prompt, played.rows, scored.result, *facts, *about, metrics=played.metrics)


class Sampler:
    """Keeps the Buffer full.

    Consumes prompts, waits for the Buffer's admission, and produces scored groups
    there. A rejected group (dynamic sampling) only makes it ask for another. With
    ``in_waves`` it asks once every running group is scored, so that the batches of the
    rollout do not depend on the duration of rewards. A failure of any group ends the
    run through :meth:`Buffer.fail`.
    """

    def __init__(
        self,
        request: Request,
        samples_per_prompt: int,
        seed: int,
        *,
        prompts: PromptStream[Prompt],
        scorer: Scorer,
        algorithm: Algorithm,
        buffer: Buffer,
        in_waves: bool = False,
    ) -> None:
        self.in_waves, self.request = in_waves, request
        self.samples_per_prompt, self.seed = samples_per_prompt, seed
        self.prompts, self.scorer, self.algorithm, self.buffer = prompts, scorer, algorithm, buffer

        # by admission number
        self.seen: dict[int, Metrics] = {}
        # admission number -> row of prompts
        self.unfinished: dict[int, int] = {}

    async def run(self) -> None:
        """Sample until cancelled."""
        groups: set[asyncio.Task[None]] = set()

        def start(number: int) -> None:
            task = asyncio.create_task(
                self._group(number, self.prompts.rows[self.unfinished[number]])
            )
            groups.add(task)
            task.add_done_callback(groups.discard)

        try:
            # those that the resumed run left unfinished come first
            for number in sorted(self.unfinished):
                start(number)
            while True:
                if self.in_waves and not self.buffer.has_room():
                    await asyncio.gather(*groups)
                number = await self.buffer.admit()
                self.unfinished[number] = self.prompts.next()
                start(number)
        except Exception as error:
            await self.buffer.fail(error)
        finally:
            for task in groups:
                task.cancel()

    async def _group(self, number: int, prompt: Prompt) -> None:
        try:
            seeds = [derive(self.seed, "sample", number, i) for i in range(self.samples_per_prompt)]
            scored = await self.scorer.sample(
                prompt, seeds, self.request, groups=self.buffer.prompts_per_step
            )

            fewest = 1 if any(s.demonstration for s in scored) else min(2, self.samples_per_prompt)
            if len(scored) < fewest:
                await self.buffer.reject(number, "its rewards are invalid")
            else:
                await self._offer(number, scored)
            # Nothing else ran since the buffer took the group, so no checkpoint can
            # hold it in both places.
            row = self.unfinished.pop(number)
            rewards = [sample.reward for sample in scored if not sample.demonstration]
            self.prompts.finished(number, row, rewards, self.unfinished)
        except Exception as error:
            # The error of a background task has to reach the trainer.
            await self.buffer.fail(error)

    async def _offer(self, number: int, scored: list[Sample]) -> None:
        group = pack(scored, number, self.samples_per_prompt, self.request.temperature)
        group = with_needed(group, scored, self.algorithm.needs)
        kept = self.algorithm.keep(group)
        self.seen[number] = describe_samples(scored, group, kept)
        if kept:
            await self.buffer.put(number, group)
        else:
            await self.buffer.reject(
                number, "the algorithm does not keep groups like it (equal rewards, say)"
            )

    def state(self) -> dict[str, Any]:
        """Return place in the prompts, unfinished ones and metrics, as plain JSON."""
        seen = [[n, {k: astuple(m) for k, m in read(one).items()}] for n, one in self.seen.items()]
        unfinished = sorted(self.unfinished.items())
        return {"prompts": self.prompts.state(), "unfinished": unfinished, "seen": seen}

    def restore(self, state: Mapping[str, Any], *, reset_data: bool = False) -> None:
        """Go on from ``state``, and start unfinished prompts again with the same seeds.

        With ``reset_data`` all prompts come from the start of the data, also in place
        of the unfinished ones.
        """
        self.seen = {n: {k: Metric(*m) for k, m in one.items()} for n, one in state.get("seen", ())}
        if reset_data:
            self.unfinished = {number: self.prompts.next() for number, _ in state["unfinished"]}
        else:
            self.prompts.restore(state["prompts"])
            self.unfinished = dict(state["unfinished"])

    def metrics(self) -> Metrics:
        """Return metrics of everything sampled since the last call, rejected groups
        included, and of how requests were shared among replicas.
        """
        # sorted, so that rounding does not depend on the order of arrival
        merged = merge(self.seen[number] for number in sorted(self.seen))
        self.seen = {}
        scorer = self.scorer
        return merged | scorer.episodes.metrics() | scorer.rollouts.router.metrics()
