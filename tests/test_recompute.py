"""Runs whose plan chooses the layers that compute their activations again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from job_run import MEASURED, reproducible, run
from test_torchrun import in_two
from test_torchrun import rows as rows
from transformers import AutoConfig

from coupler.config.compose import compose
from coupler.config.schema import Job
from coupler.engine_kit.memory_plan import GIB
from coupler.jobs import build
from coupler.jobs.build import Builder
from coupler.plugins.manager import Plugins
from coupler.run import memory_plan
from coupler.run.memory_plan import plan_memory
from coupler.run.memory_text import render
from coupler.run.plan import make_plan
from coupler.system.reads import original
from coupler.testing.memory import LARGE
from coupler_engine_fsdp.config import FSDPConfig, Recompute

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


@pytest.mark.slow
def test_two_ranks_of_torchrun(model: Path, rows: Path) -> None:
    """Where no GPU is seen, every rank recomputes all layers."""
    usual = ("engine=fsdp", "prompts_per_step=4", "deterministic=true")
    found, want = (
        in_two(model, rows, name, *usual, f"engine.gradient_checkpointing={name}")
        for name in ("auto", "true")
    )
    assert [line["loss"] for line in found] == [line["loss"] for line in want]


def test_a_run_gives_engines_the_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on a GPU that is made up: its plan needs no device."""
    AutoConfig.for_model(**LARGE["1.5b"]).save_pretrained(tmp_path)
    overrides = [
        "engine=fsdp", "algorithm=sft", "data.source=x.jsonl", f"model.path={tmp_path}",
        "engine.gradient_checkpointing=auto",
    ]  # fmt: skip
    plugins = Plugins.load()
    composed = compose(plugins, overrides, job=Job.SFT)
    plan = make_plan(composed.config, None, plugins, job=Job.SFT)

    def settled(gib: float) -> FSDPConfig:
        monkeypatch.setattr(memory_plan, "device_bytes", lambda: int(gib * GIB))
        builder = Builder(composed, plugins)
        builder.settle_recompute(plan)
        config = builder.engine("policy", trains=True).spec.engine_config
        assert builder.config.engine.recompute_num_layers == config.recompute_num_layers
        return original(config)

    assert settled(80).gradient_checkpointing == Recompute.AUTO, "no GPU"
    for module in (memory_plan, build):
        monkeypatch.setattr(module, "gpu_is_visible", lambda: True)
    assert settled(141).recomputed == 0
    assert 0 < (settled(60).recomputed or 0) < 28
    assert (
        settled(24)
        == settled(0)
        == replace(settled(24), gradient_checkpointing=Recompute.TRUE, recompute_num_layers=0)
    )
    text = render(plan_memory(composed.config, plan, 60))
    assert "of 28 layers recompute, the fewest whose training fits into 51.0 GiB, 85%" in text
    assert "28 of 28 layers recompute, since fewer do not" in render(
        plan_memory(composed.config, plan, 24)
    )
