"""Score finished episodes with a sequence classifier, many in one forward pass."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from math import isfinite
from time import perf_counter

import numpy as np

from coupler.batch import Batch
from coupler.data import Codec, Prompt
from coupler.errors import CouplerError
from coupler.interfaces import Message
from coupler.metrics import Metric, Metrics
from coupler.rewards.opinions import Episode, Opinion
from coupler.rewards.result import Invalid

# maps a batch to its values [T]
Forward = Callable[[Batch], Awaitable[np.ndarray]]
Ids = tuple[int, ...]


class RewardModel:
    """Asks a sequence classifier for the score of an episode.

    The conversation is rendered with the classifier's own tokenizer and chat template.
    Its score is the head's output at the last token that is not padding, as
    transformers has it. While one pass runs, other episodes gather for the next one.

    Args:
        forward: computes ``values`` under ``loss_mask``.
        room: the most tokens of a conversation, and the words for what sets it.
        padding: the id of ``pad_token_id`` in the model's config.json.
        alone: one episode in each pass, so that equal runs have equal bits.
    """

    def __init__(
        self,
        codec: Codec,
        forward: Forward,
        room: tuple[int, str],
        padding: int | None,
        *,
        alone: bool = False,
    ) -> None:
        self.codec, self.forward = codec, forward
        self.room, self.padding, self.alone = room, padding, alone

        self._waiting: list[tuple[Ids, asyncio.Future[float]]] = []
        self._running: asyncio.Task[None] | None = None
        self._scores: list[float] = []
        self._seconds, self._passes, self._invalid = 0.0, 0, 0

    async def ask(self, prompt: Prompt, episode: Episode) -> Opinion | Invalid:
        """Return the score of an episode.

        It is invalid if the conversation cannot be rendered or is too long, or if the
        score is not finite.
        """
        found = await self._ask(episode.conversation(prompt))
        if isinstance(found, Invalid):
            self._invalid += 1
            return found
        self._scores.append(found)
        return Opinion(found, found)

    async def _ask(self, messages: Sequence[Message]) -> float | Invalid:
        try:
            ids = self._without_padding(self.codec.conversation_ids(messages))
        except CouplerError as error:
            return Invalid(f"the reward model: {str(error).splitlines()[0]}")

        limit, name = self.room
        if not 0 < len(ids) <= limit:
            return Invalid(
                f"the reward model takes 1 to {limit} tokens ({name}), and the conversation has "
                f"{len(ids)}"
            )
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((ids, future))
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())

        score = await future
        return score if isfinite(score) else Invalid(f"the reward model gave the score {score}")

    def _without_padding(self, ids: Ids) -> Ids:
        while ids and ids[-1] == self.padding:
            ids = ids[:-1]
        return ids

    async def _run(self) -> None:
        """Score what waits, until nothing does."""
        while self._waiting:
            # What is asked for together is scored together.
            await asyncio.sleep(0)
            taken = self._waiting[:1] if self.alone else self._waiting[:]
            del self._waiting[: len(taken)]

            futures = [future for _, future in taken]
            try:
                scores = await self._pass([ids for ids, _ in taken])
            # Whoever asked raises it, and it ends the run there.
            except Exception as error:
                for future in futures:
                    if not future.done():
                        future.set_exception(error)
                continue
            for future, score in zip(futures, scores, strict=True):
                if not future.done():
                    future.set_result(score)

    async def _pass(self, asked: Sequence[Ids]) -> list[float]:
        batch, start = batch_of(asked), perf_counter()
        values = await self.forward(batch)
        self._seconds, self._passes = self._seconds + perf_counter() - start, self._passes + 1
        return [float(value) for value in values[batch["loss_mask"]]]

    def metrics(self) -> Metrics:
        """Return the mean score, the episodes of a pass, and seconds of all passes."""
        scores, self._scores = self._scores, []
        passes, self._passes = self._passes, 0
        seconds, self._seconds = self._seconds, 0.0
        invalid, self._invalid = self._invalid, 0

        # sorted, so that rounding does not depend on the order of arrival
        asked = len(scores) + invalid
        return {
            "reward_model/score": Metric(sum(sorted(scores)), len(scores)),
            "reward_model/invalid_rate": Metric(invalid, asked),
            "reward_model/episodes_per_pass": Metric(len(scores), passes),
            "time/reward_model": Metric(seconds, how="sum"),
        }


def batch_of(conversations: Sequence[Ids]) -> Batch:
    """Return a batch whose ``values`` under ``loss_mask`` are the scores.

    The value of a row is read from the token before it, so that one more token follows
    each conversation. No token of the conversation attends to it.
    """
    lengths = np.array([len(ids) + 1 for ids in conversations], np.int64)
    last = np.zeros(int(lengths.sum()), bool)
    last[lengths.cumsum() - 1] = True
    tokens = chain.from_iterable((*ids, ids[-1]) for ids in conversations)
    return Batch(lengths, {"tokens": np.fromiter(tokens, np.int32, len(last)), "loss_mask": last})
