"""Ask models about a finished episode, and give the reward function what they say."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from coupler.data import Prompt
from coupler.errors import DataError
from coupler.interfaces import Message
from coupler.metrics import Metrics
from coupler.rewards.functions import Scoring
from coupler.rewards.result import Invalid, Scored
from coupler.rewards.value import judged


@dataclass(frozen=True, slots=True)
class Opinion:
    """The answer of one model that was asked about an episode.

    Attributes:
        said: what the reward function gets, a score or a verdict.
        reward: the reward where there is no function, or why there is none.
    """

    said: float | str
    reward: float | Invalid


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished episode, as rewards read it.

    Attributes:
        completion: the text to score.
        messages: all of the conversation, with the last answer. Empty where it is
            the prompt and the completion.
    """

    completion: str
    messages: tuple[Message, ...] = ()

    def conversation(self, prompt: Prompt) -> tuple[Message, ...]:
        """Return all messages, from the first of the prompt to the last answer."""
        said = {"role": "assistant", "content": self.completion}
        return self.messages or (*prompt.messages, said)


class Asks(Protocol):
    """A model that is asked about episodes, any number of them at once."""

    async def ask(self, prompt: Prompt, episode: Episode) -> Opinion | Invalid:
        """Return the opinion of one episode, or why there is none."""
        ...

    def metrics(self) -> Metrics:
        """Return metrics since the last call of this."""
        ...


class Rewards:
    """Score episodes by the reward function, by a model, or by both.

    Every model is asked first. The function gets what they said as columns of the row.
    Without a function the reward is that of the only model. An episode without an
    opinion is invalid, and the function is not called for it.

    Args:
        models: those to ask, by the column of what they say.
    """

    def __init__(self, pool: Scoring, models: Mapping[str, Asks] | None = None) -> None:
        self.pool, self.models = pool, dict(models or {})

    @property
    def takes_group(self) -> bool:
        """Return whether the function takes all completions of a prompt at once."""
        return self.pool.takes_group

    def count(self, scored: Scored) -> None:
        """Count a reward that was given elsewhere, as :meth:`RewardPool.count` does."""
        self.pool.count(scored)

    def metrics(self) -> Metrics:
        """Return the metrics of the function and of the models."""
        found = self.pool.metrics()
        for model in self.models.values():
            found |= model.metrics()
        return found

    async def score(self, episodes: Sequence[Episode], prompt: Prompt) -> list[Scored]:
        """Score one episode, or all those of a prompt, and count them.

        Raises:
            RewardError: too many were invalid, as :meth:`RewardPool.score` says.
        """
        asked = await asyncio.gather(*(self._ask(prompt, episode) for episode in episodes))
        valid = [i for i, found in enumerate(asked) if not isinstance(found, Invalid)]
        known = [found for found in asked if not isinstance(found, Invalid)]

        if self.pool.target or not self.models:
            texts = [episodes[i].completion for i in valid]
            scored = await self._called(texts, prompt, known)
        else:
            scored = [self._alone(found) for found in known]
        by_place = dict(zip(valid, scored, strict=True))

        refused = {i: found for i, found in enumerate(asked) if isinstance(found, Invalid)}
        for i, reason in refused.items():
            by_place[i] = Scored(result=reason, seconds=0.0)
            self.pool.count(by_place[i])
        return [by_place[i] for i in range(len(episodes))]

    async def _ask(self, prompt: Prompt, episode: Episode) -> dict[str, Opinion] | Invalid:
        """Ask every model, side by side."""
        found = await asyncio.gather(*(m.ask(prompt, episode) for m in self.models.values()))
        opinions: dict[str, Opinion] = {}
        for name, one in zip(self.models, found, strict=True):
            if isinstance(one, Invalid):
                return one
            opinions[name] = one
        return opinions

    async def _called(
        self, completions: Sequence[str], prompt: Prompt, known: Sequence[Mapping[str, Opinion]]
    ) -> list[Scored]:
        """Call the function, with what models said of each completion."""
        row = prompt.row
        said = [{name: one.said for name, one in found.items()} for found in known]

        if self.takes_group:
            lists = {name: [one[name] for one in said] for name in self.models}
            columns = {**row.as_mapping(), **lists}
            scored = await self.pool.score_group(completions, row.answer, columns)
        else:
            calls = (
                self.pool.score(text, row.answer, {**row.as_mapping(), **one})
                for text, one in zip(completions, said, strict=True)
            )
            scored = await asyncio.gather(*calls)
        return [replace(one, opinions=his) for one, his in zip(scored, said, strict=True)]

    def _alone(self, found: Mapping[str, Opinion]) -> Scored:
        """Return the reward of the only model, counted."""
        (one,) = found.values()
        reason = one.reward.reason if isinstance(one.reward, Invalid) else ""
        scored = judged(None if reason else one.reward, reason)
        self.pool.count(scored)
        return replace(scored, opinions={name: one.said for name, one in found.items()})


def refuse_columns(prompts: Sequence[Prompt], models: Sequence[str], key: str) -> None:
    """Refuse rows that have a column of what a model says.

    Raises:
        DataError: there is one. The message names the column.
    """
    for prompt in prompts:
        for name in models:
            if name in prompt.row.extra:
                raise DataError(
                    f"{prompt.row.place(key)} has a column {name}, which is what "
                    "a model says of the episode.\n"
                    f"  try:  {key}.columns.ANOTHER_NAME={name}, or the column left out"
                )
