"""One GPU: two deterministic jobs with vLLM are equal to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_train import run

from coupler.testing.models import SMALL, write_random
from coupler.testing.reference import TransformersReference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def test_deterministic_jobs_are_equal(tmp_path: Path) -> None:
    """Train twice. Enough requests run at once for vLLM to batch them differently."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {**SMALL, "hidden_size": 512, "intermediate_size": 2048}
    model = TransformersReference(
        write_random(Qwen2ForCausalLM(Qwen2Config(**sizes)), tmp_path / "model", seed=0)
    )

    logs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        logs.append(
            run(
                tmp_path / name,
                model,
                "deterministic=true",
                "offload=true",
                "sync.transport=ipc",
                "engine.dtype=bf16",
                "rollout.dtype=bf16",
                "rollout.kv_cache_gib=1",
                "samples_per_prompt=32",
                "sampling.max_tokens=64",
                "engine.max_tokens_per_gpu=8192",
                "steps=4",
            )
        )

    one, two = [
        [{key: value for key, value in step.items() if not key.startswith("time/")} for step in log]
        for log in logs
    ]
    assert one == two
