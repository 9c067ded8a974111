"""Episodes with tools: what the policy is shown, what is trained, and what hostile
calls come to.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

import played_tools
import pytest
from playing import TASK, TOOLS, Played, call

from coupler import CouplerError, Task
from coupler.conversation import Codec, Ended
from coupler_agents.tools.config import CallFormat, ToolsConfig
from coupler_agents.tools.environment import ToolEnvironment


@pytest.mark.parametrize("calls", CallFormat)
def test_a_tool_is_called_and_its_result_shown(codec: Codec, calls: CallFormat) -> None:
    """The policy sees the tool, and both of its turns are trained."""
    played = Played(
        codec, [call("add", a=1, b=2), "it is 3"], functions=[f"{TOOLS}:add"], calls=calls
    )
    (row,) = played.rows
    assert len(row.trained) == 2
    assert "Add two numbers." in played.shown and "\n3" in played.shown.replace("<result>", "\n")
    assert played.outcome.reward is None, "reward.target scores the last turn"
    assert played.outcome.metrics["tool_calls"] == 1
    assert played.outcome.metrics["tool_errors"] == 0


@pytest.mark.parametrize("calls", CallFormat)
def test_calls_of_one_turn_run_side_by_side(codec: Codec, calls: CallFormat) -> None:
    both = "\n".join(call("add", a=i, b=i) for i in (20, 30))
    played = Played(codec, [both, "done"], functions=[f"{TOOLS}:add"], calls=calls)
    assert "40" in played.shown and "60" in played.shown
    assert played.outcome.metrics["tool_calls"] == 2


@pytest.mark.parametrize("calls", CallFormat)
def test_more_calls_than_the_limit_end_the_episode(codec: Codec, calls: CallFormat) -> None:
    played = Played(
        codec,
        [call("add", a=1, b=2)],
        functions=[f"{TOOLS}:add"],
        calls=calls,
        max_calls=2,
    )
    assert played.conversation.ended is Ended.CALLS
    assert len(played.rollout.requests) == 3


def test_a_class_plays_an_episode(codec: Codec) -> None:
    says = [call("guess", number=2), call("guess", number=3), "it is 3"]
    played = Played(codec, says, target=f"{TOOLS}:Guess")
    assert played.outcome.reward == 1.0
    assert "1 + 2 ? It is between 1 and 9." in played.shown
    assert "higher" in played.shown and "right" in played.shown
    lost = Played(codec, ["I give up"], target=f"{TOOLS}:Guess")
    assert lost.outcome.reward == 0.0


def test_a_simulated_user_answers(codec: Codec) -> None:
    before = played_tools.Talks.released
    played = Played(codec, ["one", "two", "three", "four"], target=f"{TOOLS}:Talks")
    assert played_tools.Talks.released == before + 1, "what an episode holds is released"
    assert len(played.rollout.requests) == 3
    assert "you said 'two', go on" in played.shown


def test_the_row_gives_arguments_that_the_policy_is_not_shown(codec: Codec) -> None:
    row = {**TASK.row, "tools_kwargs": {"look": {"execute_kwargs": {"secret": "a key"}}}}
    task = Task(TASK.messages, row, 1)
    says = [call("look", at="the box"), call("look", at="it", secret="mine"), "done"]
    played = Played(codec, says, task, functions=[f"{TOOLS}:look"])
    assert "the box: a key" in played.shown and "mine" not in played.shown.split("<result>")[-1]
    assert "takes no argument secret" in played.shown
    assert "secret" not in json.dumps(played.environment.schemas)


FAULTS: dict[str, tuple[str, str]] = {
    "unknown": (call("nope"), "there is no tool 'nope'"),
    "arguments": (call("add", c=1), "TypeError"),
    "raises": (call("fail", why="broken"), "ValueError: broken"),
    "slow": (call("sleep", seconds=2), "took longer than 0.2 seconds"),
    "long": (call("long", size=5000), "(4900 characters more)"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("calls", CallFormat)
def test_the_policy_is_told_of_a_failed_call(codec: Codec, fault: str, calls: CallFormat) -> None:
    said, told = FAULTS[fault]
    functions = [f"{TOOLS}:{name}" for name in ("add", "fail", "sleep", "long")]
    played = Played(
        codec,
        [said, "done"],
        functions=functions,
        calls=calls,
        call_timeout_s=0.2,
        max_result_characters=100,
    )
    assert told in played.shown
    found = played.outcome.metrics
    assert found["tool_errors"] + found["tool_timeouts"] + found["tool_truncated"] == 1


@pytest.mark.parametrize("calls", CallFormat)
@pytest.mark.parametrize(
    "said", ["<tool_call>\n{broken\n</tool_call>", "<tool_call>[1]</tool_call>"]
)
def test_a_call_that_cannot_be_read_is_asked_for_again(
    codec: Codec, said: str, calls: CallFormat
) -> None:
    played = Played(codec, [said, "done"], functions=[f"{TOOLS}:add"], calls=calls)
    assert "Your tool call could not be read" in played.shown
    assert played.outcome.metrics["tool_errors"] == 1


def hostile(random: Random) -> str:
    """Return a text that no honest policy says."""
    deep = "[" * 5000
    parts = [
        "<tool_call>", "</tool_call>", "{", "}", deep, '{"name": "add"}', '"name": 3', "\x00", "é",
        '{"name": "add", "arguments": {"a": 1e999, "b": NaN}}', "<|im_end|>", "null",
        '{"name": "add", "arguments": {"a": "' + "9" * 4000 + '", "b": 1}}', "</think>", " " * 500,
        '{"name": "__class__", "arguments": {}}', '{"name": "add", "arguments": "x"}',
    ]  # fmt: skip
    return "".join(random.choice(parts) for _ in range(random.randint(1, 12))) or "x"


@pytest.mark.parametrize("calls", CallFormat)
def test_hostile_answers_end_no_episode(codec: Codec, calls: CallFormat) -> None:
    """Whatever the policy says, the episode ends at its limits and trains what was
    said.
    """
    for seed in range(40):
        random = Random(seed)
        says = [hostile(random) for _ in range(3)]
        played = Played(codec, says, functions=[f"{TOOLS}:add"], calls=calls)
        assert played.rows, f"seed {seed} left no row"
        assert played.conversation.ended in (Ended.STOP, Ended.TURNS), f"seed {seed}"


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no tools": ({}, "environment.builtin or environment.mcp"),
    "no docstring": ({"functions": [f"{TOOLS}:bare"]}, "the tool bare cannot be described"),
    "a class": ({"functions": [f"{TOOLS}:Guess"]}, "is no tool"),
    "a function": ({"target": f"{TOOLS}:add"}, "is no class"),
    "no such builtin": ({"builtin": ["bash"]}, "there is no tool bash"),
    "no module": ({"target": f"{TOOLS}:Nobody"}, "has no 'Nobody'"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_tools_are_one_sentence(case: str) -> None:
    options, told = BAD[case]
    with pytest.raises(CouplerError, match=told):
        ToolEnvironment(ToolsConfig(**options))
