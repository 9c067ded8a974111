"""Environments of verifiers: what it records is what is trained."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from playing import TEMPLATE, Talk

from coupler import CouplerError, Outcome, Request, Task
from coupler.conversation import Codec, Conversation, Ended, Limits, TemplateRenderer
from coupler.errors import DataError
from coupler.testing.conversations import check_rows
from coupler.testing.environments import set_up
from coupler.testing.models import write_tokenizer
from coupler_agents.verifiers.config import VerifiersConfig

pytest.importorskip("verifiers")

from coupler_agents.verifiers.environment import EpisodeError, VerifiersEnvironment
from coupler_agents.verifiers.rows import main, rows

ENV = {
    "taskset": {"id": "played_verifiers"},
    "agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "played_verifiers"}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    write_tokenizer(made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def task(codec: Codec, **data: Any) -> Task:
    row = {"task": {"prompt": "what is 1 + 2 ?", "right": "3", **data}}
    return Task(({"role": "user", "content": "what is 1 + 2 ?"},), row, 7)


class Watched(VerifiersEnvironment):
    """Keeps what verifiers recorded."""

    def __init__(self, config: VerifiersConfig) -> None:
        super().__init__(config)
        self.episodes: list[Any] = []
        original = self.env.run_episode

        async def kept(*args: Any, **kwargs: Any) -> Any:
            self.episodes.append(await original(*args, **kwargs))
            return self.episodes[-1]

        self.env.run_episode = kept


def play(codec: Codec, says: list[str], given: Task, **options: Any) -> tuple[Talk, Outcome]:
    environment = Watched(VerifiersConfig(**{"env": ENV, **options}))
    talk = Talk(codec, says, environment)

    async def whole() -> Outcome:
        async with set_up(environment):
            return await talk.play(given)

    return talk, asyncio.run(whole())


def numbers(rows: Any) -> list[tuple[list[int], list[bool], list[float]]]:
    """Ids, what is trained of them, and log-probs: of our rows."""
    found = []
    for row in rows:
        ids: list[int] = []
        trained: list[bool] = []
        logprobs: list[float] = []
        for segment in row.trajectory.segments:
            ids += segment.ids
            trained += [bool(segment.logprobs)] * len(segment.ids)
            logprobs += segment.logprobs or [0.0] * len(segment.ids)
        found.append((ids, trained, logprobs))
    return found


@pytest.mark.parametrize("compacts", [False, True])
def test_its_record_equals_ours(codec: Codec, folder: Path, compacts: bool) -> None:
    """Token by token, where verifiers samples after ids of its own renderer."""
    says = ["I think 4", "it is 3"]
    given = task(codec, compacts=compacts)
    talk, outcome = play(codec, says, given, renderer_model=str(folder))
    mine = talk.conversation.close()
    check_rows(mine, talk.rollout.answered)

    (trace,) = talk.environment.episodes[0].traces  # type: ignore[attr-defined]
    theirs = [(b.token_ids, b.sampled_mask, b.logprobs) for b in trace.branches]
    assert numbers(mine) == theirs
    assert len(mine) == 1 + compacts
    assert outcome.reward == 2.0


def test_its_messages_equal_ours(codec: Codec) -> None:
    """Where the gateway turns messages into ids, verifiers has no ids to compare."""
    talk, outcome = play(codec, ["I think 4", "it is 3"], task(codec))
    (row,) = talk.conversation.close()
    check_rows((row,), talk.rollout.answered)

    (trace,) = talk.environment.episodes[0].traces  # type: ignore[attr-defined]
    roles = [message.role for message in trace.messages]
    assert roles == ["user", "assistant", "user", "assistant"]
    said = [message.content for message in trace.assistant_messages]
    assert said == ["I think 4", "it is 3"]
    assert outcome == Outcome(2.0, metrics={"length": 7.0, "reward_right": 1.0})


def test_many_episodes_at_once_do_not_mix(codec: Codec) -> None:
    environment = Watched(VerifiersConfig(env=ENV))
    talks = [Talk(codec, [f"no {i}", f"it is {i}"], environment) for i in range(12)]

    async def whole() -> list[Outcome]:
        async with set_up(environment):
            tasks = [task(codec, right=str(i)) for i in range(12)]
            return await asyncio.gather(*map(Talk.play, talks, tasks))

    assert [outcome.reward for outcome in asyncio.run(whole())] == [2.0] * 12
    for number, talk in enumerate(talks):
        assert f"no {number}" in talk.shown and len(talk.rollout.requests) == 2
        assert len(talk.conversation.close()) == 1


def test_an_episode_that_fails_has_failed(codec: Codec) -> None:
    with pytest.raises(EpisodeError, match="the program is broken"):
        play(codec, ["3"], task(codec, fails="harness"))
    with pytest.raises(EpisodeError, match="nobody knows"):
        play(codec, ["3"], task(codec, fails="scoring"))


def test_a_limit_is_no_failure(codec: Codec) -> None:
    """Verifiers ends at its own limit of turns and scores. Ours may end it earlier."""
    talk, outcome = play(codec, ["it is 3"], task(codec), max_turns=1)
    assert len(talk.rollout.requests) == 1 and outcome.reward == 2.0

    environment = Watched(VerifiersConfig(env=ENV))
    talk = Talk(codec, ["it is 3"], environment)
    renderer = TemplateRenderer(codec, tools=True)
    limits = Limits(4096, turns=1)
    talk.conversation = Conversation(talk.rollout, renderer, limits, Request((), 1, 1.0, seed=7))

    async def whole() -> Outcome:
        async with set_up(environment):
            return await talk.play(task(codec))

    assert asyncio.run(whole()).reward is None, "it was not scored"
    assert talk.conversation.ended is Ended.TURNS
    assert len(talk.conversation.close()) == 1


def test_rows_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    found = list(rows(ENV, 2))
    assert found[1]["prompt"] == "what is 1 + 2 ?" and found[1]["task"]["right"] == "3"
    main([json.dumps(ENV)])
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()][:2] == found


def test_wrong_descriptions_and_rows_are_one_sentence(codec: Codec) -> None:
    with pytest.raises(CouplerError, match=r"environment.env cannot be made: ModuleNotFound"):
        VerifiersEnvironment(VerifiersConfig(env={"taskset": {"id": "nobody-has-it"}}))
    with pytest.raises(CouplerError, match=r"environment.env cannot be made: "):
        VerifiersEnvironment(VerifiersConfig())
    with pytest.raises(DataError, match="no task of verifiers in its column task"):
        play(codec, ["3"], Task((), {}, 1))
    with pytest.raises(DataError, match="the row's task is no task of played_verifiers"):
        play(codec, ["3"], Task((), {"task": {"prompt": "x"}}, 1))
