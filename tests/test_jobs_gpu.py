"""GRPO from the command line on one GPU by turns and on two, with each rollout that is
installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from job_run import arguments, metrics, write_inputs
from transformers import Qwen2Config, Qwen2ForCausalLM

from coupler.testing.models import SMALL, write_qwen2, write_qwen3_moe, write_random

NUM_GPUS = torch.cuda.device_count()
ROLLOUTS = [name for name in ("vllm", "sglang") if find_spec(f"coupler_rollout_{name}")]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not NUM_GPUS, reason="no GPU"),
    pytest.mark.parametrize("rollout", ROLLOUTS),
]
on_two = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")

IN_BF16 = 0.15  # nats between log-probs
BY_TURNS = ("offload=true", "sync.transport=ipc")
SETTINGS = ("engine.dtype=bf16", "rollout.dtype=bf16", "rollout.enforce_eager=true",
            "rollout.max_model_len=256", "trackers=[jsonl]")  # fmt: skip


def train(model: Path, folder: Path, rollout: str, *overrides: str) -> list[dict[str, float]]:
    """Run a job in a process of its own, check its log, and return it."""
    folder.mkdir(exist_ok=True)
    write_inputs(folder)
    given = [
        each
        for each in arguments("train", model, folder, folder / "run")
        if not each.startswith(("rollout", "trackers", "engine.dtype"))
    ]
    if not any(each.startswith("rollout.kv_cache_gib=") for each in overrides):
        given.append("rollout.kv_cache_gib=1")
    if rollout == "sglang" and (backend := os.environ.get("COUPLER_SGLANG_ATTENTION")):
        given.append(f"rollout.attention_backend={backend}")

    command = [sys.executable, "-m", "coupler.cli", *given, f"rollout={rollout}"]
    subprocess.run([*command, *SETTINGS, *overrides], check=True, timeout=400)
    log = metrics(folder / "run")
    assert log[0]["sync/probe"] < IN_BF16 < log[0]["sync/probe_permuted"]
    assert all(step["train_infer/abs_diff"] < IN_BF16 for step in log[1:])
    return log


@pytest.mark.parametrize(
    "algorithm",
    [("algorithm=grpo",), ("algorithm=ppo", "critic.engine.lr=1e-2")],
    ids=["a reference beside", "a critic and a reference beside"],
)
def test_roles_take_turns_on_one_device(
    tmp_path: Path, rollout: str, algorithm: tuple[str, ...]
) -> None:
    """The step-0 gate, the hand-over, and a ledger of each phase.

    The rollout starts, with nine tenths of the device, when the engine has given its
    memory back.
    """
    # 200 MB, of which what stays on the device is a small part
    config = Qwen2Config(**{**SMALL, "intermediate_size": 1 << 16})
    wide = write_random(Qwen2ForCausalLM(config), tmp_path / "wide", seed=0)
    log = train(wide, tmp_path, rollout, *BY_TURNS, "rollout.kv_cache_gib=0", *algorithm)

    assert all(step["memory/train/device_gib"] > 0 for step in log[1:])
    started = {
        role: log[0].get(f"memory/start_{role}/policy_gib", 0.0) for role in ("policy", "rollout")
    }
    assert started["rollout"] < 0.5 * started["policy"]
    assert "memory/reference/device_gib" in log[1]
    assert ("critic/loss" in log[1]) == ("algorithm=ppo" in algorithm)


@on_two
@pytest.mark.parametrize(
    "overrides",
    [
        ("engine.ranks=2", "rollout.tensor_parallel=2", *BY_TURNS),
        ("ray.placement=disjoint", "sync.transport=nccl"),
    ],
    ids=["one replica on both, in turns", "a GPU for training, a GPU for inference"],
)
def test_two_devices(tmp_path: Path, rollout: str, overrides: tuple[str, ...]) -> None:
    model = write_qwen2(tmp_path / "model", tied=True)
    train(model, tmp_path, rollout, "executor=ray", *overrides)


@on_two
def test_tensor_parallel_training_feeds_a_replica_on_each_gpu(tmp_path: Path, rollout: str) -> None:
    sizes = ("engine.ranks=2", "engine.tensor_parallel=2", "rollout.replicas=2", "executor=ray")
    model = write_qwen2(tmp_path / "model", tied=False)
    log = train(model, tmp_path, rollout, "engine=megatron", *sizes, *BY_TURNS)
    assert all(step["train/grad_norm"] > 0 for step in log[1:])


def test_the_experts_that_sampled_are_the_experts_that_train(tmp_path: Path, rollout: str) -> None:
    """R3, where the samples of a prompt find it in the prefix cache: its tokens have
    routes too.
    """
    model = write_qwen3_moe(tmp_path / "model")
    shared = (
        "engine=megatron",
        "rollout.routed_experts=true",
        "rollout.prefix_caching=true",
        "steps=2",
        *BY_TURNS,
    )
    replayed = train(model, tmp_path / "R3", rollout, *shared, "router_replay=R3")
    train(model, tmp_path / "free", rollout, *shared)
    assert all("moe/route_disagreement" in step for step in replayed[1:])
