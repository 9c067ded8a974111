"""Two configurations are compared by what they do to results."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from coupler.config.compose import compose
from coupler.config.options import Options
from coupler.config.overrides import parse_overrides
from coupler.interfaces import NO_EFFECT, EngineConfig, EnvironmentConfig, no_effect
from coupler.plugins.manager import Plugins
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


def test_an_environment_that_came_or_went_is_a_difference() -> None:
    """A run may be without one, and the name that it would have is no default."""
    plays = {"environment": {"name": "toy", "max_turns": 8}}
    options = Options({"engine": OneConfig, "environment": EnvironmentConfig})

    (change,) = changes({}, plays, options)
    assert str(change) == "environment.name was None, is toy" and change.undo == "environment=null"
    (change,) = changes(plays, {}, OPTIONS)
    assert str(change) == "environment.name was toy, is None" and change.undo == "environment=toy"
    assert not changes(plays, plays, options)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ({"a": 1, "b": "x"}, {"a": 1, "b": "x", "c": 2}),
        ({"a": 1, "b": 2}, {"a": 1}),
        ({}, {"a": 1}),
        ({"a": 1}, {"c": 2}),
    ],
)
def test_what_undoes_a_mapping_does_so_in_a_shell_and_over_the_file(
    was: dict[str, Any], now: dict[str, Any], tmp_path: Path
) -> None:
    (change,) = changes({"data": {"args": was}}, {"data": {"args": now}}, OPTIONS)
    given = ["bash", "-c", f"printf '%s\\n' {change.undo}"]
    typed = subprocess.run(given, capture_output=True, text=True, check=True).stdout.splitlines()
    (tmp_path / "run.yaml").write_text(json.dumps({"data": {"args": now}}))
    composed = compose(Plugins.load(), typed, str(tmp_path / "run.yaml"), complete=False)
    assert composed.config.data.args == was


@pytest.mark.parametrize(
    "value",
    ["a b", "it's", "null", "1e-3", "x.py:f", 1e-08, True, None, [1, "a,b"], {"k": [0.5]}, "${x}"],
)
def test_what_undoes_a_change_is_read_as_the_value_it_had(value: Any) -> None:
    old = {"data": {"args": value}} if isinstance(value, dict) else {"model": {"path": value}}
    (change,) = changes(old, {}, OPTIONS)
    text = change.undo[1:-1] if change.undo.startswith('"') else change.undo
    assert parse_overrides([text]) == [(change.key, value)]
