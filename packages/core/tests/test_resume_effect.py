"""Two configurations are compared by what they do to results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from coupler.config.options import Options
from coupler.config.overrides import parse_overrides
from coupler.interfaces import NO_EFFECT, EngineConfig, no_effect
from coupler.run.effect import changes


@dataclass
class OneConfig(EngineConfig):
    name: str = "one"
    width: int = 1
    buffers: int = no_effect(2)
    hints: list[str] = field(default_factory=list, metadata=NO_EFFECT)


OPTIONS = Options({"engine": OneConfig})


def differing(old: dict[str, Any], new: dict[str, Any], gone: list[str] | None = None) -> list[str]:
    return [str(change) for change in changes(old, new, OPTIONS, gone)]


def test_a_backend_says_which_options_change_nothing() -> None:
    assert OneConfig().buffers == 2 and OneConfig(buffers=3).buffers == 3
    old, new = {"buffers": 2, "hints": [], "ranks": 1}, {"buffers": 9, "hints": ["a"], "ranks": 4}
    assert differing({"engine": {**old, "width": 1}}, {"engine": {**new, "width": 2}}) == [
        "engine.width was 1, is 2"
    ]


def test_what_one_side_does_not_name_has_its_default() -> None:
    assert (
        differing({"engine": {"name": "one"}}, {"engine": {"name": "one", "width": 1}, "seed": 0})
        == []
    )
    assert differing({"engine": {"name": "one", "width": 3}}, {}) == ["engine.width was 3, is 1"]
    assert differing({"data": {"args": {"a": 1, "b": 2}}}, {"data": {"args": {}}}) == [
        "data.args was {'a': 1, 'b': 2}, is {}"
    ]


def test_an_option_that_left_refuses_what_had_another_value() -> None:
    old = {"engine": {"name": "one", "depth": 3}}
    assert differing(old, {"engine": {"name": "one"}}, gone=[]) == []
    gone = ["engine.depth was 3, this release has no such option"]
    assert differing(old, {}, gone=["engine.depth"]) == differing(old, {}) == gone


def test_of_another_backend_the_choice_alone_is_named() -> None:
    old = {
        "engine": {"name": "two", "width": 5, "height": 4},
        "critic": {"engine": {"name": "two", "width": 1}},
    }
    (change,) = changes(old, {"engine": {"name": "one"}}, OPTIONS)
    assert str(change) == "engine.name was two, is one" and change.undo == "engine=two"


@pytest.mark.parametrize(
    "value",
    ["a b", "it's", "null", "1e-3", "x.py:f", 1e-08, True, None, [1, "a,b"], {"k": [0.5]}, "${x}"],
)
def test_what_undoes_a_change_is_read_as_the_value_it_had(value: Any) -> None:
    old = {"data": {"args": value}} if isinstance(value, dict) else {"model": {"path": value}}
    (change,) = changes(old, {}, OPTIONS)
    text = change.undo[1:-1] if change.undo.startswith('"') else change.undo
    assert parse_overrides([text]) == [(change.key, value)]
