"""GRPO with engine=megatron and rollout=hf from the command line: policy and reference in one process, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from job_run import metrics, reproducible, run
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

ENGINE = ("engine=megatron", "trackers=[jsonl]", "deterministic=true", "profile.steps=[1]")


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run("train", model, tmp_path_factory.mktemp("megatron") / "run", *ENGINE)


def test_it_trains_and_rollouts_follow(trained: Path) -> None:
    lines = metrics(trained)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(line["train/grad_norm"] > 0 for line in lines[1:])
    assert all(line["train_infer/abs_diff"] < 1e-3 for line in lines[1:])


def test_the_export_is_the_trained_model_in_the_layout_it_came_in(trained: Path, model: Path) -> None:
    exported, before = (load_file(folder / "model.safetensors") for folder in (trained / "export", model))
    assert {n: t.shape for n, t in exported.items()} == {n: t.shape for n, t in before.items()}
    assert any(not torch.equal(exported[name], tensor) for name, tensor in before.items())
    assert AutoModelForCausalLM.from_pretrained(trained / "export").config.model_type == "qwen2"


def test_two_runs_are_equal(trained: Path, model: Path, tmp_path: Path) -> None:
    assert reproducible(run("train", model, tmp_path / "again", *ENGINE)) == reproducible(trained)


def test_the_profiled_step_left_a_trace_and_no_other_did(trained: Path) -> None:
    (path,) = (trained / "profile").iterdir()
    assert path.name == "policy-rank0-step1.trace.json"
    assert any("mm" in event.get("name", "") for event in json.loads(path.read_text())["traceEvents"])
