"""A job with ``trackers=[console]`` shows what ``metrics.jsonl`` keeps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from job_run import write_inputs

from coupler.builtin.trackers.console import COLUMNS
from coupler.cli import main
from coupler.testing.models import write_tokenizer, write_toy


def test_the_console_shows_every_step_and_its_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hold each printed figure against the value that the other tracker wrote."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    write_inputs(tmp_path)
    write_tokenizer(write_toy(tmp_path / "toy"))
    command = [
        "train", "engine=toy", "engine.lr=0.1", "rollout=toy", "algorithm=toy", "steps=3",
        "prompts_per_step=2", "samples_per_prompt=4", "sampling.max_tokens=8",
        "data.max_prompt_tokens=64", "trackers=[console,jsonl]",
        f"model.path={tmp_path / 'toy'}", f"data.source={tmp_path / 'rows.jsonl'}",
        f"reward.target={tmp_path / 'reward.py'}:score", f"run_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    assert main(command) == 0

    shown = {
        int(number): line
        for number, line in re.findall(r"^step +(\d+)  (.*)$", capsys.readouterr().out, re.M)
    }
    kept = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert {1, 2, 3} <= shown.keys() <= {step["step"] for step in kept}

    for step in kept[1:]:
        line = shown[step["step"]]
        columns = [(heading, form, step[name]) for name, heading, form in COLUMNS if name in step]
        for heading, form, value in columns:
            if heading != "loss":  # hidden beside a reward
                assert f"{heading} {form.format(value)}" in line, (heading, line)
        assert "reward " in line
        assert "loss" not in line
