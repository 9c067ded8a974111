"""A plugin, and the times in the metrics, observe every step of a real job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from job_run import write_inputs

from coupler.cli import main
from coupler.testing.models import write_tokenizer, write_toy

OBSERVER = """
import json
from pathlib import Path

from coupler import hookimpl


@hookimpl
def coupler_step_end(step, values):
    with Path({file!r}).open("a") as file:
        file.write(json.dumps([step, values.get("loss"), values.get("time/step")]) + "\\n")
"""
STEPS = 4


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """Train with a module that observes the steps, and return ``metrics.jsonl``."""
    write_inputs(tmp_path)
    write_tokenizer(write_toy(tmp_path / "toy"))
    observer = OBSERVER.format(file=str(tmp_path / "observed"))
    (tmp_path / "observer_of_steps.py").write_text(observer)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COUPLER_PLUGINS", "observer_of_steps")

    command = [
        "train", "engine=toy", "engine.lr=0.1", "rollout=toy", "algorithm=toy",
        f"steps={STEPS}", "prompts_per_step=2", "samples_per_prompt=4",
        "sampling.max_tokens=8", "data.max_prompt_tokens=64", "trackers=[jsonl]",
        f"model.path={tmp_path / 'toy'}", f"data.source={tmp_path / 'rows.jsonl'}",
        f"reward.target={tmp_path / 'reward.py'}:score", f"run_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    assert main(command) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return [step for step in map(json.loads, lines) if step["step"] > 0]


def test_a_plugin_observes_every_step(tmp_path: Path, log: list[dict[str, float]]) -> None:
    observed = [json.loads(line) for line in (tmp_path / "observed").read_text().splitlines()]
    expected = [[step["step"], step["loss"], step["time/step"]] for step in log]
    assert [each for each in observed if each[0] > 0] == expected
    assert len(expected) == STEPS


def test_the_times_of_a_step_are_parts_of_it(log: list[dict[str, float]]) -> None:
    """Roles take turns here, so that their times add up to less than the step."""
    for step in log:
        parts = [step[f"time/{name}"] for name in ("sample", "complete", "train", "sync")]
        assert all(part > 0 for part in parts), step
        assert sum(parts) <= step["time/step"] * 1.001, step

        rate = step["batch/tokens"] / step["time/step"]
        assert step["time/tokens_per_second"] == pytest.approx(rate, rel=1e-6)
        assert step["time/train_per_1k_tokens"] > 0
