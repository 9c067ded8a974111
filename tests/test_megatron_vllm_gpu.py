"""GRPO with engine=megatron and rollout=vllm from the command line, on one GPU by turns
and on two.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from job_run import arguments, metrics, write_inputs

from coupler.testing.models import write_qwen2, write_qwen3_moe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
ENGINES = ("engine=megatron", "engine.dtype=bf16", "rollout=vllm", "rollout.dtype=bf16",
           "rollout.enforce_eager=true",
           "rollout.kv_cache_gib=1", "offload=true", "sync.transport=ipc",
           "trackers=[jsonl]")  # fmt: skip
IN_BF16 = 0.15  # nats between log-probs


def train(model: Path, folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Run a job in a process of its own; return its metrics."""
    folder.mkdir(exist_ok=True)
    write_inputs(folder)
    given = [
        each
        for each in arguments("train", model, folder, folder / "run")
        if not each.startswith("rollout")
    ]
    command = [
        sys.executable,
        "-m",
        "coupler.cli",
        *given,
        *ENGINES,
        "rollout.max_model_len=256",
        *overrides,
    ]
    subprocess.run(command, check=True, timeout=400)
    return metrics(folder / "run")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensor_parallel_training_feeds_a_replica_on_each_gpu(tmp_path: Path) -> None:
    sizes = ("engine.ranks=2", "engine.tensor_parallel=2", "rollout.replicas=2", "executor=ray")
    log = train(write_qwen2(tmp_path / "model", tied=False), tmp_path, *sizes)
    assert log[0]["sync/probe"] < IN_BF16 < log[0]["sync/probe_permuted"]
    assert all(
        step["train_infer/abs_diff"] < IN_BF16 and step["train/grad_norm"] > 0 for step in log[1:]
    )


def test_the_experts_that_sampled_are_the_experts_that_train(tmp_path: Path) -> None:
    """R3, where the samples of a prompt find it in the prefix cache: its tokens have
    routes too.
    """
    model = write_qwen3_moe(tmp_path / "model")
    shared = ("rollout.routed_experts=true", "rollout.prefix_caching=true", "steps=2")
    replayed = train(model, tmp_path / "R3", *shared, "router_replay=R3")
    free = train(model, tmp_path / "free", *shared)
    assert all("moe/route_disagreement" in step for step in replayed[1:])
    assert all(step["train_infer/abs_diff"] < IN_BF16 for step in (*replayed[1:], *free[1:]))
