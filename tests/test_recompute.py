"""Runs whose plan chooses the layers that compute their activations again."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_run import MEASURED, reproducible, run
from test_torchrun import in_two
from test_torchrun import rows as rows

from coupler.jobs import build
from coupler.run import memory_plan

AUTO = "engine.gradient_checkpointing=auto"


@pytest.mark.parametrize("job", ["train", "sft"])
def test_a_run_and_its_rest_are_those_of_any_number(
    job: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The run goes on where no GPU is seen, so that all layers recompute."""
    same = ("deterministic=true", "offload=false", "checkpoint.every_steps=1")
    whole = run(job, model, tmp_path / "whole" / "run", *same)
    assert "recompute" not in caplog.text

    with monkeypatch.context() as patch:
        for module in (memory_plan, build):
            patch.setattr(module, "gpu_is_visible", lambda: True)
        patch.setattr(memory_plan, "device_bytes", lambda: 80 << 30)
        folder = tmp_path / "auto" / "run"
        run(job, model, folder, *same, AUTO, "steps=2")
    none = "policy: 0 of 2 layers recompute, the fewest whose training fits into 68.0 GiB"
    assert none in caplog.text
    caplog.clear()

    run(job, model, folder, *same, AUTO)
    assert "policy: all layers recompute, since the controller sees no GPU" in caplog.text
    but = (*MEASURED, "run/steps")
    assert reproducible(folder, but) == reproducible(whole, but)


def test_two_ranks_of_torchrun(model: Path, rows: Path) -> None:
    """Where no GPU is seen, every rank recomputes all layers."""
    usual = ("engine=fsdp", "prompts_per_step=4", "deterministic=true")
    found, want = (
        in_two(model, rows, name, *usual, f"engine.gradient_checkpointing={name}")
        for name in ("auto", "true")
    )
    assert [line["loss"] for line in found] == [line["loss"] for line in want]
