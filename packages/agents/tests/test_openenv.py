"""An environment behind a server of OpenEnv."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playing import Talk

from coupler import CouplerError, Outcome, Task
from coupler.conversation import Codec
from coupler.errors import DataError
from coupler.testing.conversations import check_rows
from coupler.testing.environments import set_up
from coupler_agents.openenv.config import OpenEnvConfig

pytest.importorskip("openenv")

from coupler_agents.openenv.environment import OpenEnvEnvironment

SERVER = str(Path(__file__).with_name("played_openenv.py"))
FIELDS = {"action_field": "message", "observation_field": "text"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, str(port)])

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


def task(seed: int = 7, **row: Any) -> Task:
    return Task(({"role": "user", "content": "Play."},), row, seed)


def play(
    codec: Codec, url: str, says: list[str], given: Task | None = None, **options: Any
) -> tuple[Talk, Outcome]:
    environment = OpenEnvEnvironment(OpenEnvConfig(url=url, **{**FIELDS, **options}))
    talk = Talk(codec, says, environment)

    async def whole() -> Outcome:
        async with set_up(environment):
            return await talk.play(given or task())

    outcome = asyncio.run(whole())
    check_rows(talk.conversation.close(), talk.rollout.answered)
    return talk, outcome


def test_a_game_is_played(codec: Codec, url: str) -> None:
    """The seed of the episode decides the draws, and each turn has its reward."""
    says = [f"I say <a>{number}</a>" for number in range(1, 5)]
    played = [
        play(codec, url, says, task(seed), action_pattern="<a>(.*?)</a>") for seed in (1, 1, 2, 3)
    ]
    outcomes = [outcome for _, outcome in played]
    assert outcomes[0] == outcomes[1] and len({o.turn_rewards for o in outcomes}) > 1
    for talk, outcome in played:
        assert outcome.turn_rewards[-1] == 1.0
        assert outcome.reward == sum(outcome.turn_rewards)
        assert "Play.\nIt is between 1 and 4." in talk.prompt(0)


def test_actions_and_observations_are_json_without_fields(codec: Codec, url: str) -> None:
    says = ['{"message": "9"}', "[1]", '{"massage": "1"}', '{"message": "8"}']
    fields = {"action_field": "", "observation_field": "", "invalid_reward": -1.0}
    talk, outcome = play(codec, url, says, **fields)
    assert outcome.turn_rewards[:4] == (-0.25, -1.0, -1.0, -0.25)
    assert '"text": "not 9"' in talk.prompt(1)
    assert "An action is a JSON object." in talk.prompt(2)
    assert "The action is not valid" in talk.prompt(3) and "massage" in talk.prompt(3)


def test_the_row_has_arguments_of_reset(codec: Codec, url: str) -> None:
    given = task(reset_kwargs={"largest": 1, "other": None})
    _, outcome = play(codec, url, ["1"], given)
    assert outcome == Outcome(1.0, turn_rewards=(1.0,))
    with pytest.raises(DataError, match="the row's reset_kwargs is a list"):
        play(codec, url, ["1"], task(reset_kwargs=[1]))


def test_a_server_that_fails_fails_the_episode(codec: Codec, url: str) -> None:
    with pytest.raises(RuntimeError, match="the game is broken"):
        play(codec, url, ["break"])
    with pytest.raises(ConnectionError):
        play(codec, "http://127.0.0.1:9", ["1"])


def test_wrong_options_are_one_sentence(codec: Codec, url: str) -> None:
    with pytest.raises(CouplerError, match="environment=openenv needs a server"):
        OpenEnvEnvironment(OpenEnvConfig())
    with pytest.raises(CouplerError, match=r"environment.observation_field=txt is no field"):
        play(codec, url, ["1"], observation_field="txt")
