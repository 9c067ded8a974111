"""A rollout where its inference engine is not: listed, planned with, and one sentence
when a run needs it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from job_run import arguments, write_inputs

from coupler.cli import main

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}


@pytest.fixture(params=ENGINES)
def name(request: pytest.FixtureRequest) -> str:
    if find_spec(request.param) is not None:
        pytest.skip(f"{ENGINES[request.param]} is installed here")
    return request.param


def without_rollout(model: Path, folder: Path) -> list[str]:
    given = arguments("train", model, folder, folder / "run")
    return [argument for argument in given if argument != "rollout=hf"]


def test_it_can_be_planned_with(
    name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    planned = without_rollout(model, tmp_path)
    assert main(["plan", *planned[1:], f"rollout={name}"]) == 0
    assert f"rollout ({name})" in capsys.readouterr().out


def test_a_run_says_what_to_install(
    name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    assert main([*without_rollout(model, tmp_path), f"rollout={name}"]) == 2
    printed = capsys.readouterr().err
    assert f"rollout={name} needs {ENGINES[name]}, which this interpreter has not." in printed
    assert f"pip install 'coupler-rollout-{name}[cuda]'" in printed and "rollout.python" in printed
    assert "Traceback" not in printed
