"""Check what every environment must do: play many episodes at once that do not mix,
take whatever a policy says, and leave nothing behind.

The episodes are real conversations over a chat template with tools. The policy follows
a script.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coupler.conversation.workers import open_environment
from coupler.errors import CouplerError
from coupler.interfaces import (
    Completion,
    Environment,
    EnvironmentConfig,
    Outcome,
    Request,
)
from coupler.rewards.result import Invalid
from coupler.rewards.value import judged
from coupler.testing.conversations import check_rows
from coupler.testing.environments import (
    HOSTILE,
    SAYINGS,
    Say,
    Stage,
    Theatre,
    set_up,
    settled,
)
from coupler.testing.subject import Subject

AT_ONCE, CANCELLED = 24, 30
FEW = CANCELLED // 3  # threads and files that an environment may keep for all episodes
GRACE_S = 5.0
BLOCKED_S = 0.8  # of the event loop, by one step of an episode
MOST_REFUSED = 20

Make = Callable[[], Environment]


@pytest.fixture
def make(environment_subject: Subject) -> Make:
    """Make the environment anew."""
    config: EnvironmentConfig = environment_subject.config()

    def made() -> Environment:
        return open_environment(replace(config), environment_subject.backend.load)

    try:
        made()
    except CouplerError as error:
        if environment_subject.selected:
            raise
        pytest.skip(str(error).splitlines()[0])
    return made


@pytest.fixture
def theatre(environment_subject: Subject, make: Make, tmp_path: Path) -> Theatre:
    if not environment_subject.selected:
        pytest.importorskip("transformers", reason="the kit's tokenizer needs transformers")
    return Theatre.build(tmp_path / "model", environment_subject.rows, tools=make().uses_tools)


def played(make: Make, stages: Sequence[Stage], *, at_once: bool = False) -> Sequence[Stage]:
    """Play episodes in one environment."""

    async def play() -> None:
        async with set_up(make()) as environment:
            if at_once:
                await asyncio.gather(*(stage.play(environment) for stage in stages))
            else:
                for stage in stages:
                    await stage.play(environment)

    asyncio.run(play())
    return stages


def of_every_saying(theatre: Theatre) -> list[Stage]:
    return [
        theatre.stage(what, say, number)
        for what, say in SAYINGS.items()
        for number in range(len(theatre.rows))
    ]


def mixed(theatre: Theatre, **more: Any) -> list[Stage]:
    says = list(SAYINGS.items())
    return [theatre.stage(*says[i % len(says)], i, **more) for i in range(AT_ONCE)]


def test_an_episode_is_played_to_its_end(make: Make, theatre: Theatre) -> None:
    for stage in played(make, of_every_saying(theatre)):
        assert not stage.failure, f"expected an Outcome on {stage.what}, came {stage.failure}"
        outcome = stage.outcome
        is_one = isinstance(outcome, Outcome) or (outcome is None and stage.policy.refused)
        assert is_one, f"expected an Outcome on {stage.what}, came a {type(outcome).__name__}"
        said = stage.rollout.answered or (outcome and outcome.invalid)
        assert said, f"expected a turn of the policy on {stage.what}, came none"


def test_episodes_leave_the_event_loop_to_others(make: Make, theatre: Theatre) -> None:
    """All episodes and all replicas share it."""

    async def longest() -> float:
        worst, done = 0.0, False

        async def tick() -> None:
            nonlocal worst
            while not done:
                start = time.monotonic()
                await asyncio.sleep(0.01)
                worst = max(worst, time.monotonic() - start)

        async with set_up(make()) as environment:
            ticking = asyncio.create_task(tick())
            for stage in mixed(theatre)[:6]:
                await stage.play(environment)
            done = True
            await ticking
        return worst

    # The shortest of two, since a machine may have other work.
    worst = min(asyncio.run(longest()) for _ in range(2))
    assert worst < BLOCKED_S, (
        f"expected the event loop to run on within {BLOCKED_S} s, it stood for {worst:.2f} s: "
        "call what blocks in a thread"
    )


def test_the_rows_train_every_token_once(make: Make, theatre: Theatre) -> None:
    """They hold each request as it was, whatever the environment did to the history."""
    for stage in played(make, mixed(theatre)):
        try:
            check_rows(stage.policy.conversation.close(), stage.rollout.answered)
        except AssertionError as error:
            raise AssertionError(f"expected whole rows of {stage.what}, came: {error}") from None


@pytest.mark.parametrize("what", HOSTILE)
def test_whatever_the_policy_says_is_taken(make: Make, theatre: Theatre, what: str) -> None:
    """An episode that raises is played again. A bad answer is a bad reward."""
    stages = [theatre.stage(what, lambda _, __: HOSTILE[what])]
    stages.append(theatre.stage(f"{what}, later", _after_a_call(HOSTILE[what]), 1))
    for stage in played(make, stages):
        assert not stage.failure, (
            f"expected an Outcome where the policy says {stage.what}, came {stage.failure[:300]}"
        )
        _check_numbers(stage)


def _after_a_call(text: str) -> Say:
    return lambda tools, turn: text if turn else SAYINGS["calls of tools"](tools, 0)


def test_rewards_are_finite_or_invalid(make: Make, theatre: Theatre) -> None:
    for stage in played(make, of_every_saying(theatre)):
        _check_numbers(stage)


def _check_numbers(stage: Stage) -> None:
    outcome = stage.outcome or Outcome()
    if outcome.reward is not None and not outcome.invalid:
        result = judged(outcome.reward).result
        wrong = result.reason if isinstance(result, Invalid) else ""
        assert not wrong, (
            f"expected a finite reward, None or Outcome.invalid on {stage.what}: it {wrong}"
        )

    turns, given = len(stage.rollout.answered), outcome.turn_rewards
    assert len(given) in (0, turns), (
        f"expected {turns} turn rewards or none on {stage.what}, came {len(given)}"
    )
    numbers = {**outcome.metrics, **{f"turn {i}": number for i, number in enumerate(given)}}
    for name, number in numbers.items():
        finite = isinstance(number, float | int) and math.isfinite(number)
        assert finite, f"expected a finite number in {name} of {stage.what}, came {number!r}"
    texts = {"answer": outcome.answer or "", "invalid": outcome.invalid}
    for name, text in texts.items():
        assert isinstance(text, str), (
            f"expected a text in Outcome.{name} of {stage.what}, came a {type(text).__name__}"
        )


def test_equal_episodes_are_equal(make: Make, theatre: Theatre) -> None:
    """A failed episode is played again with the same seed, and so is a resumed run: in
    another environment, and in another order.
    """
    random.seed(1)
    first = played(make, mixed(theatre))
    random.seed(2)
    second = played(make, mixed(theatre)[::-1])[::-1]
    for one, other in zip(first, second, strict=True):
        _check_equal(one, other, "when it is played again")


def test_episodes_at_once_do_not_mix(make: Make, theatre: Theatre) -> None:
    """Each sees its own task and its own seed."""
    alone = mixed(theatre)
    played(make, alone)
    together = played(make, mixed(theatre, pause=0.005), at_once=True)
    for one, other in zip(alone, together, strict=True):
        _check_equal(one, other, f"among {AT_ONCE} at once")


def _check_equal(one: Stage, other: Stage, when: str) -> None:
    names = ("messages", "reward", "answer", "invalid", "turn rewards", "failure")
    for name, first, second in zip(names, one.told, other.told, strict=True):
        assert first == second, (
            f"expected the same {name} of {one.what} {when}, came {str(first)[:300]} and "
            f"{str(second)[:300]}"
        )


def test_a_task_is_left_alone(make: Make, theatre: Theatre) -> None:
    """All episodes of a prompt get the same row."""
    stages = mixed(theatre)
    before = [deepcopy(stage.task) for stage in stages]
    for stage, task in zip(played(make, stages), before, strict=True):
        assert stage.task == task, (
            f"expected the task of {stage.what} to stay {task}, it became {stage.task}"
        )


def test_a_limit_may_come_at_any_turn(make: Make, theatre: Theatre) -> None:
    """An environment may let ``ConversationOver`` pass, and asks for no more then."""
    stages = [theatre.stage(w, s, turns=turns) for w, s in SAYINGS.items() for turns in (1, 2)]
    for stage in played(make, stages):
        assert not stage.failure, (
            f"expected {stage.what} to end after its last turn, came {stage.failure}"
        )
        refused = stage.policy.refused
        assert refused <= MOST_REFUSED, (
            f"expected no request after the end of {stage.what}, came {refused}"
        )


@pytest.mark.parametrize("at", [0, 1])
def test_a_cancelled_episode_leaves_nothing(make: Make, theatre: Theatre, at: int) -> None:
    """A run cancels the episodes of a group where one of them failed."""

    async def cancel() -> None:
        async with set_up(make()) as environment:
            for number in range(2):
                await _cancel_one(theatre, environment, number, at)
            before, tasks = _held(), asyncio.all_tasks()
            for number in range(CANCELLED):
                await _cancel_one(theatre, environment, number, at)

            ended = await settled(lambda: asyncio.all_tasks() <= tasks, GRACE_S)
            assert ended, (
                f"expected no task after {CANCELLED} cancelled episodes, came "
                f"{next(iter(asyncio.all_tasks() - tasks))}"
            )
            _check_held(before, FEW, f"after {CANCELLED} cancelled episodes")

    asyncio.run(cancel())


class Waits:
    """Passes requests on to a script, whose turn ``at`` takes long."""

    def __init__(self, stage: Stage, at: int) -> None:
        self.script, self.at = stage.rollout, at
        self.reached = asyncio.Event()

    async def generate(self, request: Request) -> Completion:
        """Sample what the script says."""
        if len(self.script.requests) >= self.at:
            self.script.pause = 60.0
            self.reached.set()
        return await self.script.generate(request)


async def _cancel_one(theatre: Theatre, environment: Environment, number: int, at: int) -> None:
    """Cancel an episode while its turn ``at`` is sampled, if it has so many."""
    stage = theatre.stage("calls of tools", SAYINGS["calls of tools"], number)
    waits = Waits(stage, at)
    stage.policy.conversation.rollout = waits
    episode = asyncio.create_task(environment.episode(stage.task, stage.policy))
    waiting = asyncio.create_task(waits.reached.wait())
    await asyncio.wait({episode, waiting}, timeout=GRACE_S, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if episode.done() and not episode.cancelled():
        assert not episode.exception(), f"expected an Outcome, came {episode.exception()!r}"
        return

    asked = len(stage.rollout.requests)
    episode.cancel()
    await asyncio.wait({episode}, timeout=GRACE_S)
    assert episode.done(), (
        f"expected a cancelled episode to end within {GRACE_S:g} s, it still runs"
    )
    assert episode.cancelled(), (
        "expected a cancelled episode to pass the CancelledError on, came "
        f"{episode.exception() or episode.result()!r}"
    )
    more = len(stage.rollout.requests) - asked
    assert not more, f"expected no request of a cancelled episode, came {more}"


def _held() -> dict[str, int]:
    """Count what this process holds."""
    files = Path("/proc/self/fd")
    counts = {"threads": threading.active_count()}
    return counts | ({"files": len(os.listdir(files))} if files.exists() else {})


def _check_held(before: dict[str, int], more: int, when: str) -> None:
    end = time.monotonic() + GRACE_S
    while (held := _held()) and time.monotonic() < end:
        if all(held[what] <= before[what] + more for what in before):
            return
        time.sleep(0.02)
    raise AssertionError(f"expected {before} {when}, or {more} more at most, came {held}")


def test_closing_leaves_nothing(make: Make, theatre: Theatre) -> None:
    played(make, mixed(theatre)[:2])
    before = _held()
    for _ in range(3):
        played(make, mixed(theatre), at_once=True)
    _check_held(before, 2, "after close()")


def test_it_is_set_up_and_closed_again(make: Make, theatre: Theatre) -> None:
    """A run closes it where ``setup`` failed too, and may do so twice."""
    environment = make()
    _quiet(environment.close, "close() before setup()")
    for time_ in ("first", "second"):
        stage = theatre.stage("numbers", SAYINGS["numbers"])
        played(lambda: environment, [stage])
        assert not stage.failure, (
            f"expected an Outcome after the {time_} setup(), came {stage.failure}"
        )
        _quiet(environment.close, "close() again")


def _quiet(call: Callable[[], Coroutine[Any, Any, None]], what: str) -> None:
    try:
        asyncio.run(asyncio.wait_for(call(), GRACE_S))
    except Exception as error:
        raise AssertionError(
            f"expected {what} to do nothing, came {type(error).__name__}: {error}"
        ) from error
