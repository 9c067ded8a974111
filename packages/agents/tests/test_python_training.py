"""Whole runs with the tool python, on the toy backends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_training import inputs

from coupler.cli import main
from coupler.rewards import sandbox
from coupler_agents.sandbox.parent import why_none

__all__ = ["inputs"]
OPTIONS = (
    "engine=toy", "engine.lr=0.1", "rollout=toy", "algorithm=toy", "trackers=[jsonl]",
    "environment=tools", "environment.calls=text", "environment.max_turns=2",
    "environment.builtin=[python]", "environment.max_tokens=1024", "data.max_prompt_tokens=256",
    "sampling.max_tokens=48", "prompts_per_step=2", "samples_per_prompt=2", "steps=2",
    "reward.target=played_tools:by_program",
)  # fmt: skip


def given(inputs: Path, run: Path) -> list[str]:
    places = [f"model.path={inputs / 'toy'}", f"data.source={inputs / 'rows.jsonl'}"]
    return ["train", *OPTIONS, *places, f"run_dir={run}"]


@pytest.mark.skipif(bool(why_none()), reason=why_none())
def test_a_run_has_the_tool_and_a_reward_that_runs_programs(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given(inputs, tmp_path / "run")) == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["environment/failed"] == 0 for line in lines[1:])
    assert all("environment/tool_calls" in line for line in lines[1:])


def test_a_run_without_a_sandbox_ends_at_its_start(
    inputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sandbox, "why_no_bubblewrap", sandbox.why_no_bubblewrap.__wrapped__)
    assert main(given(inputs, tmp_path / "run")) == 2
    said = capsys.readouterr().err
    assert "in a sandbox, and there is none here (bwrap is not installed)" in said
    assert "environment.sandbox_url=" in said and "Traceback" not in said
