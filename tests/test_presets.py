"""Every preset of ``algorithm`` that is GRPO with other switches, in a whole run."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

import pytest
from job_run import metrics, run

from coupler.testing.models import write_qwen2

PRESETS = ("gspo", "cispo", "sapo", "opo", "maxrl", "reinforce_plus_plus_baseline")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen2(tmp_path_factory.mktemp("models") / "model", tied=True)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_trains(tmp_path: Path, model: Path, preset: str) -> None:
    """With two optimizer steps for each batch, of which the second has ratios off 1."""
    log = metrics(
        run(
            "train",
            model,
            tmp_path / "run",
            f"algorithm={preset}",
            "steps=2",
            "optimizer_steps_per_batch=2",
        )
    )
    assert all(isfinite(step["policy_loss"]) for step in log[1:])
    # A step whose rewards are equal moves nothing.
    assert max(step["train/grad_norm"] for step in log[1:]) > 0
    assert any(step["ratio_mean"] != 1 for step in log[1:])
