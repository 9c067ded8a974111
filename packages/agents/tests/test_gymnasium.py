"""Environments of gymnasium: one of its own, and one of text."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from playing import Talk

from coupler import CouplerError, Outcome, Task
from coupler.conversation import Codec, Ended
from coupler.errors import ConfigError, DataError
from coupler.testing.conversations import check_rows
from coupler.testing.environments import set_up

pytest.importorskip("gymnasium")

import kit_gymnasium

from coupler_agents.gymnasium.config import GymnasiumConfig
from coupler_agents.gymnasium.environment import GymnasiumEnvironment

GUESS = "kit_gymnasium:Guess"
ROW = {"answer": "", "index": 0}
LAKE: dict[str, Any] = {
    "id": "FrozenLake-v1",
    "kwargs": {"render_mode": "ansi", "is_slippery": False},
    "actions": ["left", "down", "right", "up"],
    "action_pattern": r"<action>(\w+)</action>",
}


def task(seed: int = 7, **row: Any) -> Task:
    return Task(({"role": "user", "content": "Play."},), {**ROW, **row}, seed)


def play(codec: Codec, says: list[str], given: Task | None = None, **options: Any) -> Talk:
    """Play one episode. Its outcome is at ``outcome``."""
    talk = Talk(codec, says, GymnasiumEnvironment(GymnasiumConfig(**options)))

    async def whole() -> Outcome:
        async with set_up(talk.environment):
            return await talk.play(given or task())

    talk.outcome = asyncio.run(whole())  # type: ignore[attr-defined]
    check_rows(talk.conversation.close(), talk.rollout.answered)
    return talk


def test_frozen_lake_is_walked(codec: Codec) -> None:
    path = ["right", "right", "down", "down", "down", "right"]
    says = [f"I go <action>left</action>, no, <action>{step}</action>" for step in path]
    talk = play(codec, says, **LAKE)
    outcome = talk.outcome  # type: ignore[attr-defined]
    assert outcome.reward == 1.0
    assert outcome.turn_rewards == (0, 0, 0, 0, 0, 1)
    assert outcome.metrics == {"invalid_actions": 0, "terminated": 1, "truncated": 0}
    assert "Play.\n[S]FFF" in talk.prompt(0), "a colour shows where the player is"
    assert "S[F]FF" in talk.prompt(1)


def test_an_observation_without_a_text_is_json(codec: Codec) -> None:
    talk = play(codec, ["0"], id="Blackjack-v1")
    first = talk.prompt(0).partition("Play.\n")[2].splitlines()[0]
    hand, dealer, ace = json.loads(first.partition("<")[0])
    assert 4 <= hand <= 21 and 1 <= dealer <= 10 and ace in (0, 1)


@pytest.mark.parametrize("options", [{"target": GUESS}, {"id": "kit_gymnasium:KitGuess-v0"}])
def test_a_text_environment_is_played(codec: Codec, options: dict[str, Any]) -> None:
    """Its draws follow the seed of the episode, and it is closed."""
    kit_gymnasium.Guess.closed.clear()
    says = [str(number) for number in range(1, 7)]
    options = {**options, "kwargs": {"largest": 4}}
    talks = [play(codec, says, task(seed), **options) for seed in (1, 1, *range(2, 9))]
    outcomes = [talk.outcome for talk in talks]  # type: ignore[attr-defined]
    assert len(kit_gymnasium.Guess.closed) == len(talks)
    assert outcomes[0] == outcomes[1]
    assert len({outcome.turn_rewards for outcome in outcomes}) > 1
    for outcome in outcomes:
        assert outcome.reward == sum(outcome.turn_rewards)
        assert outcome.metrics["terminated"] + outcome.metrics["truncated"] == 1
    assert "not 1" in talks[0].prompt(1)


def test_the_row_has_arguments_of_its_own(codec: Codec) -> None:
    given = task(env_kwargs={"largest": 1, "fails": None})
    talk = play(codec, ["1"], given, target=GUESS, kwargs={"largest": 5})
    assert "between 1 and 1." in talk.prompt(0)
    assert talk.outcome.reward == 1.0  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="the row's env_kwargs is a list"):
        play(codec, ["1"], task(env_kwargs=[1]), target=GUESS)


INVALID: dict[str, tuple[dict[str, Any], str, str]] = {
    "no match": (LAKE, "go right", "An action is written as"),
    "no name": (LAKE, "<action>jump</action>", "The actions are: left, down, right, up."),
    "no number": ({**LAKE, "actions": [], "action_pattern": ""}, "right", "a number from 0 to 3"),
    "another number": ({"id": "CliffWalking-v1"}, "4", "An action is a number from 0 to 3."),
    "many digits": ({"id": "CliffWalking-v1"}, "9" * 9000, "a number from 0 to 3"),
    "too long": ({"target": GUESS}, "x" * 21, "An action has 1 to 20 characters"),
    "nothing": ({"target": GUESS}, " ", "An action has 1 to 20 characters"),
}


@pytest.mark.parametrize("case", INVALID)
def test_a_turn_without_an_action_is_told_so(codec: Codec, case: str) -> None:
    options, said, told = INVALID[case]
    talk = play(codec, [said], invalid_reward=-0.5, **options)
    outcome = talk.outcome  # type: ignore[attr-defined]
    assert told in talk.shown
    assert talk.conversation.ended is Ended.TURNS
    assert outcome.turn_rewards == (-0.5,) * 6 and outcome.reward == -3.0
    assert outcome.metrics["invalid_actions"] == 6


def test_numbers_of_info_are_tracked(codec: Codec) -> None:
    talk = play(codec, ["x"], target=GUESS, info_metrics=["won", "steps", "secret", "nothing"])
    found = talk.outcome.metrics  # type: ignore[attr-defined]
    assert {name for name in found if name.startswith("info_")} == {"info_won", "info_steps"}
    assert found["info_won"] == 0 and found["info_steps"] == kit_gymnasium.MAX_STEPS


def test_a_step_that_fails_or_hangs_fails_the_episode(codec: Codec) -> None:
    with pytest.raises(RuntimeError, match="the game is broken"):
        play(codec, ["1"], target=GUESS, kwargs={"fails": True})
    with pytest.raises(TimeoutError):
        play(codec, ["1"], target=GUESS, kwargs={"step_seconds": 1.0}, step_timeout_s=0.1)


def test_an_environment_is_closed_after_the_step_that_still_runs(codec: Codec) -> None:
    config = GymnasiumConfig(target=GUESS, kwargs={"step_seconds": 0.5})

    async def cancel() -> None:
        async with set_up(GymnasiumEnvironment(config)) as environment:
            talk = Talk(codec, ["1"], environment)
            playing = asyncio.create_task(talk.play(task()))
            while not talk.rollout.answered:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            playing.cancel()
            await asyncio.wait({playing}, timeout=0.2)
            assert playing.cancelled()
            game = kit_gymnasium.Guess
            assert game.made not in game.closed, "the step still runs"
            await asyncio.sleep(0.8)
            assert game.made in game.closed

    asyncio.run(cancel())


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "nothing": ({}, CouplerError, "environment=gymnasium needs one environment"),
    "both": ({"id": "x", "target": GUESS}, CouplerError, "needs one environment"),
    "no id": ({"id": "FrozenLak-v1"}, CouplerError, "environment.id=FrozenLak-v1 cannot be made"),
    "no module": ({"id": "nobody_has:It-v0"}, CouplerError, "cannot be made: No module"),
    "no callable": ({"target": "kit_gymnasium:MAX_STEPS"}, CouplerError, "no class and no func"),
    "pattern": ({**LAKE, "action_pattern": "("}, ConfigError, "is no regular expression"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_one_sentence(case: str) -> None:
    options, kind, told = WRONG[case]
    with pytest.raises(kind, match=told):
        GymnasiumEnvironment(GymnasiumConfig(**options))


def test_actions_that_cannot_be_said_are_one_sentence(codec: Codec) -> None:
    with pytest.raises(CouplerError, match="a policy says an action of a Discrete or a Text"):
        play(codec, ["1"], target="kit_gymnasium:Box")
    with pytest.raises(CouplerError, match=r"environment.actions has 2 different names"):
        play(codec, ["1"], **{**LAKE, "actions": ["left", "right"]})
