"""``make quickstart`` at a small scale: what it prints last, and the run folder that it
leaves.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[1]
SMALL = {
    "grpo": (
        "steps=2",
        "prompts_per_step=4",
        "samples_per_prompt=4",
        "algorithm.dynamic_sampling=false",
    ),
    "ppo": ("steps=2", "prompts_per_step=8", "critic.warmup_steps=1"),
}


def quickstart(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "examples/quickstart/quickstart.py",
        "--run-dir",
        str(folder),
        *arguments,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )


def test_a_misspelt_option_shows_before_anything_runs(tmp_path: Path) -> None:
    done = quickstart(tmp_path / "run", "engine.lrr=1e-3")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "quickstart: unknown option engine.lrr.\n  did you mean:  engine.lr\n"
    )
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_the_quickstart(algorithm: str, tmp_path: Path) -> None:
    done = quickstart(
        tmp_path, "--algorithm", algorithm, "--sft-steps", "3", "--held-out", "8", *SMALL[algorithm]
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    found = re.fullmatch(
        rf"quickstart: before=(\d\.\d\d) sft=(\d\.\d\d) {algorithm}=(\d\.\d\d) seconds=\d+", last
    )
    assert found, last
    stages = ("eval_before", "eval_sft", f"eval_{algorithm}")
    scores = [
        json.loads((tmp_path / stage / "metrics.jsonl").read_text())["eval/reward"]
        for stage in stages
    ]
    assert [f"{score:.2f}" for score in scores] == [*found.groups()]
    assert len((tmp_path / "eval_sft" / "eval.jsonl").read_text().splitlines()) == 8 * 4

    folder = tmp_path / algorithm
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["steps"], config["algorithm"]["name"]) == (2, algorithm)
    assert [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ] == [0, 1, 2]
    assert (folder / "checkpoints" / "step_2" / "MANIFEST.json").is_file()
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    model = AutoModelForCausalLM.from_pretrained(folder / "export")
    prompt = AutoTokenizer.from_pretrained(folder / "export")(
        "Spell this word backward", return_tensors="pt"
    )
    with torch.no_grad():
        assert model(**prompt).logits.isfinite().all()
