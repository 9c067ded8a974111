"""A group whose episode failed ends as a whole before its episodes are played again."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from coupler.conversation import episodes
from coupler.conversation.episodes import EpisodeFailed, Played, together
from coupler.conversation.packing import Sample
from coupler.conversation.tree import Row as OnePath
from coupler.data import Prompt, Row
from coupler.executors.waits import Waits
from coupler.interfaces import Completion, EnvironmentConfig, Outcome, Request
from coupler.loop.routing import Router
from coupler.loop.sampler import Scorer
from coupler.metrics import Metrics

CONFIG = EnvironmentConfig("slow", retries=1)
PROMPT = Prompt(Row("", "", 0, {}), (5,))


class SlowToEnd:
    """Plays episodes of which the first of seed 0 fails, and the others take a while to
    give back what they hold.
    """

    def __init__(self) -> None:
        self.begun: Counter[int] = Counter()
        self.held: Counter[int] = Counter()
        self.most = 0

    async def play(self, prompt: Prompt, request: Request) -> Played:
        seed = request.seed
        self.begun[seed] += 1
        self.held[seed] += 1
        self.most = max(self.most, *self.held.values())
        try:
            await asyncio.sleep(0.01)
            if seed == 0 and self.begun[seed] == 1:
                raise EpisodeFailed(CONFIG, "it broke")
            await asyncio.sleep(0.05)
        finally:
            if seed:
                await asyncio.sleep(0.05)
            self.held[seed] -= 1
        done = Completion((1,), (0.0,), (0,), "stop")
        return Played((OnePath.of_one_turn((5,), done),), Outcome(reward=1.0), "stop", {})

    async def whole(self, group: Callable[[], Awaitable[list[Sample]]]) -> list[Sample]:
        try:
            return await group()
        except EpisodeFailed:
            assert not self.held.total(), "an episode of the failed group still runs"
            return await group()

    def metrics(self) -> Metrics:
        return {}


def scorer(plays: SlowToEnd, waits: Waits) -> tuple[Scorer, Router]:
    router = Router(1)
    parts: Any = SimpleNamespace(
        executor=SimpleNamespace(waits=waits),
        router=router,
        takes_group=False,
        count=lambda scored: None,
        decode=lambda ids: "",
    )
    return Scorer(parts, parts, parts, plays), router


def test_two_generations_of_a_group_do_not_overlap() -> None:
    plays, waits = SlowToEnd(), Waits(60, 60)
    scores, router = scorer(plays, waits)
    found = asyncio.run(scores.sample(PROMPT, [0, 1, 2], Request((), 8), groups=1))
    waits.close()
    assert len(found) == 3
    assert plays.begun == {0: 2, 1: 2, 2: 2}
    assert plays.most == 1
    assert not router.sessions


def test_a_group_that_is_called_off_ends_its_episodes() -> None:
    plays, waits = SlowToEnd(), Waits(60, 60)

    async def story() -> None:
        scores, _ = scorer(plays, waits)
        group = asyncio.create_task(scores.sample(PROMPT, [1, 2], Request((), 8), groups=1))
        await asyncio.sleep(0.02)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        assert not plays.held.total()

    asyncio.run(story())
    waits.close()


def test_an_episode_that_does_not_end_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "END_S", 0.1)

    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(0.6)
                return
            except asyncio.CancelledError:
                continue

    async def failing() -> None:
        await asyncio.sleep(0.01)
        raise EpisodeFailed(CONFIG, "it broke")

    async def story() -> float:
        start = time.monotonic()
        with pytest.raises(EpisodeFailed):
            await together([stubborn(), failing()])
        return time.monotonic() - start

    assert asyncio.run(story()) < 0.5
