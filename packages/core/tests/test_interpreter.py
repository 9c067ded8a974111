"""The interpreter of a role is compared with ours before anything starts in it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coupler.errors import ConfigError
from coupler.executors.describe import describe
from coupler.executors.interpreter import check_interpreter
from coupler.plugins.manager import Plugins


def interpreter(folder: Path, change: Callable[[dict[str, Any]], None]) -> str:
    """A program that says of itself what ours says, but for ``change``."""
    said = describe()
    change(said)
    (folder / "said.json").write_text(json.dumps(said))
    program = folder / "python"
    program.write_text(f"#!/bin/sh\ncat {folder / 'said.json'}\n")
    program.chmod(0o755)
    return str(program)


def test_our_own_interpreter_fits(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH={os.pathsep.join(sys.path)} exec {sys.executable} "$@"\n'
    )
    program.chmod(0o755)
    check_interpreter("rollout", "toy", str(program), Plugins.load())


def without_toy(said: dict[str, Any]) -> None:
    said["plugins"] = [row for row in said["plugins"] if row["name"] != "toy"]


def newer_toy(said: dict[str, Any]) -> None:
    said["plugins"] = [{**row, "version": "9.9"} for row in said["plugins"]]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda said: said.update(python="3.9"), "Python is 3.9 there and 3."),
        (lambda said: said.update(ray="1.0"), "ray is 1.0 there and "),
        (lambda said: said.update(core="9.9"), "coupler-core is 9.9 there and "),
        (lambda said: said.update(api=9), "API generation is 9 there and 1 here"),
        (without_toy, "no plugin there provides rollout=toy"),
        (newer_toy, "coupler-core is 9.9 there and "),
    ],
)
def test_a_difference_is_one_sentence(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    path = interpreter(tmp_path, change)
    with pytest.raises(ConfigError) as error:
        check_interpreter("rollout", "toy", path, Plugins.load())
    first, *rest = str(error.value).splitlines()
    assert first == f"rollout.python={path} does not fit this controller:"
    assert len(rest) == 1 and rest[0].startswith(f"  {sentence}")


def test_what_is_no_interpreter_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.python=/not/there does not start: "):
        check_interpreter("rollout", "toy", "/not/there", Plugins.load())
    with pytest.raises(
        ConfigError, match=r"rollout\.python=/bin/false has no working coupler: it printed nothing"
    ):
        check_interpreter("rollout", "toy", "/bin/false", Plugins.load())
