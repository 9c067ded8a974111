"""Tools that are classes, and the arguments that a row gives to tools."""

from __future__ import annotations

from typing import Any

import played_tools
import pytest
from playing import TASK, TOOLS, Played, call

from coupler import Task
from coupler.conversation import Codec
from coupler.errors import CouplerError, DataError
from coupler_agents.tools.config import CallFormat


def task(kwargs: Any) -> Task:
    return Task(TASK.messages, {**TASK.row, "tools_kwargs": kwargs}, 1)


@pytest.fixture(autouse=True)
def log() -> list[str]:
    played_tools.counter.log.clear()
    return played_tools.counter.log


@pytest.mark.parametrize("calls", CallFormat)
def test_an_object_lives_for_one_episode(codec: Codec, calls: CallFormat, log: list[str]) -> None:
    """The row's arguments reach each part of its life."""
    given = {
        "create_kwargs": {"start": 10},
        "execute_kwargs": {"times": 2},
        "calc_reward_kwargs": {"scale": 0.5},
        "release_kwargs": {"why": "done"},
    }
    says = [call("counter", by=1), call("counter", by=3), "it is 18"]
    for _ in range(2):
        played = Played(
            codec, says, task({"counter": given}), functions=[f"{TOOLS}:counter"], calls=calls
        )
        assert "12" in played.codec.tokenizer.decode(played.rollout.requests[1].prompt)
        assert "18" in played.shown and "times" not in played.shown
        assert played.outcome.reward == 9.0
        assert played.outcome.metrics["tool_reward_counter"] == 9.0
    assert log == ["reset 10", "release done"] * 2


def test_rewards_of_tools_and_of_the_class_are_added(codec: Codec) -> None:
    says = [call("counter", by=2), call("guess", number=3), "done"]
    played = Played(codec, says, functions=[f"{TOOLS}:counter"], target=f"{TOOLS}:Guess")
    assert played.outcome.reward == 3.0


@pytest.mark.parametrize("calls", CallFormat)
def test_a_row_may_offer_some_of_the_tools(codec: Codec, calls: CallFormat) -> None:
    """As names, or as the schemas that datasets have. The others cannot be called."""
    schema = {"type": "function", "function": {"name": "counter", "parameters": {}}}
    functions = [f"{TOOLS}:add", f"{TOOLS}:counter"]
    for column in (["counter"], [schema, "counter"]):
        row = {**TASK.row, "tools": column}
        says = [call("add", a=1, b=2), call("counter", by=1), "done"]
        played = Played(codec, says, Task(TASK.messages, row, 1), functions=functions, calls=calls)
        assert "there is no tool 'add'. There are: counter" in played.shown
        assert played.outcome.metrics["tool_errors"] == 1
        first = played.codec.tokenizer.decode(played.rollout.requests[0].prompt)
        assert "Count up" in first and '"add"' not in first

    none = Task(TASK.messages, {**TASK.row, "tools": []}, 1)
    played = Played(codec, [call("add", a=1, b=2)], none, functions=functions, calls=calls)
    assert played.outcome.metrics["tool_calls"] == 0


@pytest.mark.parametrize(
    ("column", "said"),
    [(["nope"], "names 'nope'"), ("counter", "is a str"), ([{"function": 1}], "names None")],
)
def test_a_row_that_offers_what_is_not_there_is_refused(
    codec: Codec, column: Any, said: str
) -> None:
    row = {**TASK.row, "tools": column}
    with pytest.raises(DataError, match=f"the row's column tools {said}"):
        Played(codec, ["done"], Task(TASK.messages, row, 1), functions=[f"{TOOLS}:counter"])


def test_a_table_has_nulls_where_other_rows_name_a_tool(codec: Codec) -> None:
    """A Parquet column of structs has every key in every row."""
    kwargs = {"elsewhere": None, "counter": {"create_kwargs": {"start": None}, "extra": None}}
    played = Played(codec, ["done"], task(kwargs), functions=[f"{TOOLS}:counter"])
    assert played.outcome.reward == 0.0


FOREIGN: dict[str, tuple[Any, str]] = {
    "no tool": ({"count": {}}, "tools_kwargs names the tool 'count', and there is none"),
    "no key": ({"counter": {"create": {}}}, "tools_kwargs has counter.create, which nothing reads"),
    "no object": ({"counter": [1]}, "tools_kwargs.counter is a list, and no object"),
    "no column of objects": ("counter", "tools_kwargs is a str, and no object"),
    "reset": (
        {"counter": {"create_kwargs": {"begin": 1}}},
        r"counter.create_kwargs does not fit counter.reset: .*'begin'",
    ),
    "call": (
        {"counter": {"execute_kwargs": {"by": 1}}},
        "counter.execute_kwargs has by, which the tool counter does not take from a row",
    ),
    "no method": (
        {"needy": {"create_kwargs": {"key": "k"}, "release_kwargs": {"a": 1}}},
        "needy.release_kwargs is for a method release, and the class needy has none",
    ),
    "a function": (
        {"add": {"create_kwargs": {"a": 1}}},
        "add.create_kwargs is for a tool that is a class, and add is none",
    ),
    "left out": ({}, "needy.create_kwargs does not fit needy.reset: missing .*'key'"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_row_that_does_not_fit_is_refused(codec: Codec, case: str, log: list[str]) -> None:
    """Before any object is made."""
    kwargs, told = FOREIGN[case]
    functions = [f"{TOOLS}:{name}" for name in ("counter", "add", "needy")]
    with pytest.raises(DataError, match=told):
        Played(codec, ["done"], task(kwargs), functions=functions)
    assert not log


def test_arguments_in_the_column_tools_are_refused(codec: Codec) -> None:
    row = {"tools": {"counter": {"create_kwargs": {"start": 1}}}}
    with pytest.raises(DataError, match="column tools has arguments of counter"):
        Played(codec, ["done"], Task(TASK.messages, row, 1), functions=[f"{TOOLS}:counter"])


def test_a_reward_that_is_no_number_fails_the_episode(codec: Codec, log: list[str]) -> None:
    """And the object is released all the same."""
    with pytest.raises(CouplerError, match=r"broken.get_reward returned nan"):
        Played(codec, ["done"], functions=[f"{TOOLS}:broken"])
    assert log == ["reset 0", "release "]
