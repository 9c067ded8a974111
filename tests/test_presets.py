"""Every preset of ``algorithm`` that is GRPO with other switches, in a whole run."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

import numpy as np
import pytest
from job_run import arguments, metrics, run, write_inputs

from coupler.batch import Batch
from coupler.cli import main
from coupler.testing.models import write_qwen2

PARTS = """
def graded(completion, answer):
    parts = {"length": len(completion) / 10, "letters": len(set(completion)) / 5}
    return {"reward": sum(parts.values()), **parts}
"""
# The options of each preset that a run of two steps needs to show it.
PRESETS: dict[str, tuple[str, ...]] = {
    "gspo": (),
    "cispo": (),
    "sapo": (),
    "opo": (),
    "maxrl": (),
    "reinforce_plus_plus_baseline": (),
    "reinforce_plus_plus": (),
    "clip_cov": ("algorithm.covariance_low=0.1", "algorithm.covariance_share=0.1"),
    "kl_cov": ("algorithm.covariance_share=0.1",),
    "gmpo": ("algorithm.log_mismatch=true",),
    "dppo": ("algorithm.reject.sequence_mean_k3=0.05",),
    "pass_at_k": (),
    "gdpo": ("algorithm.part_weights.letters=0.5",),
    "gpg": (),
    "luspo": ("algorithm.correction_cap=2", "algorithm.correction_normalize=true"),
    "topr": (),
    "remax": ("samples_per_prompt=1", "algorithm.whiten=true"),
}
REPORTED = {
    "clip_cov": {"covariance_marked"},
    "kl_cov": {"covariance_marked"},
    "gmpo": {"mismatch/ess", "mismatch/ess_sequence", "mismatch/ppl_train", "clip_low"},
    "dppo": {"rejected", "mismatch/chi2_sequence", "clip_high"},
    "gdpo": {"reward_parts/length", "reward_parts/letters"},
    "luspo": {"correction_capped", "mismatch/weight", "clip_high"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen2(tmp_path_factory.mktemp("models") / "model", tied=True)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_trains(tmp_path: Path, model: Path, preset: str) -> None:
    """With two optimizer steps for each batch, of which the second has ratios off 1."""
    options = [*PRESETS[preset]]
    if preset == "gdpo":
        (tmp_path / "parts.py").write_text(PARTS)
        options.append(f"reward.target={tmp_path / 'parts.py'}:graded")
    log = metrics(
        run(
            "train",
            model,
            tmp_path / "run",
            f"algorithm={preset}",
            "steps=2",
            "optimizer_steps_per_batch=2",
            *options,
        )
    )
    assert all(isfinite(step["policy_loss"]) for step in log[1:])
    # A step whose rewards are equal moves nothing.
    assert max(step["train/grad_norm"] for step in log[1:]) > 0
    assert any(step["ratio_mean"] != 1 for step in log[1:])
    for name in REPORTED.get(preset, ()):
        assert all(isfinite(step[name]) for step in log[1:]), name


@pytest.mark.parametrize(("temperature", "equal"), [(0.001, True), (1.0, False)])
def test_remax_compares_with_a_greedy_episode(
    tmp_path: Path, model: Path, temperature: float, equal: bool
) -> None:
    """Samples of almost no temperature are greedy ones, and have their reward."""
    folder = run(
        "train",
        model,
        tmp_path / "run",
        "algorithm=remax",
        "algorithm.kl=none",
        "steps=1",
        "record.every_steps=1",
        f"sampling.temperature={temperature}",
    )
    batch = Batch.load(folder / "record" / "step_1" / "batch.npz")
    ahead = batch["reward"] - batch["greedy_reward"]
    assert len(set(batch["greedy_reward"])) <= len(set(batch["group"]))
    assert bool((ahead == 0).all()) is equal
    assert metrics(folder)[1]["advantages/mean"] == pytest.approx(
        np.average(ahead, weights=batch.sum_by_sequence(batch["loss_mask"])), abs=1e-6
    )


def test_remax_refuses_rewards_of_whole_groups(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "together.py").write_text(
        "def scores(completions, answer):\n    return [float(len(c)) for c in completions]\n"
    )
    reward = f"reward.target={tmp_path / 'together.py'}:scores"
    write_inputs(tmp_path)
    given = arguments("train", model, tmp_path, tmp_path / "run")
    assert main([*given, "algorithm=remax", "algorithm.kl=none", reward]) == 2
    assert "reward.target scores all completions of a prompt together" in capsys.readouterr().err
