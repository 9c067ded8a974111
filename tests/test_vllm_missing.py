"""rollout=vllm where vLLM is not: listed, planned with, and one sentence when a run
needs it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from job_run import arguments, write_inputs

from coupler.cli import main

pytestmark = pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")


def test_it_can_be_planned_with(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    planned = [
        a for a in arguments("train", model, tmp_path, tmp_path / "run") if a != "rollout=hf"
    ]
    assert main(["plan", *planned[1:], "rollout=vllm"]) == 0
    assert "rollout (vllm)" in capsys.readouterr().out


def test_a_run_says_what_to_install(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    given = [a for a in arguments("train", model, tmp_path, tmp_path / "run") if a != "rollout=hf"]
    assert main([*given, "rollout=vllm"]) == 2
    printed = capsys.readouterr().err
    assert "rollout=vllm needs vLLM, which this interpreter has not." in printed
    assert "pip install 'coupler-rollout-vllm[cuda]'" in printed and "rollout.python" in printed
    assert "Traceback" not in printed
