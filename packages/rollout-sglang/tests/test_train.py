"""``coupler train rollout=sglang``, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coupler.cli import main
from coupler.testing.models import write_qwen3_moe
from coupler.testing.reference import TransformersReference

REWARD = """
def score(completion, answer):
    return len(set(completion)) / (1 + len(completion)) + (answer in completion)
"""
SETTINGS = {
    "engine.dtype": "fp32",
    "engine.lr": "1e-2",
    "engine.max_tokens_per_gpu": "256",
    "rollout.dtype": "fp32",
    "data.max_prompt_tokens": "64",
    "sampling.max_tokens": "8",
    "samples_per_prompt": "4",
    "prompts_per_step": "2",
    "steps": "3",
    "strict": "true",
}
# With a larger rate all tokens of this model but one are soon cut off.
MASKED = ("sampling.top_p=0.9", "sampling.top_k=20", "engine.lr=1e-4")


def arguments(folder: Path, reference: TransformersReference, *overrides: str) -> list[str]:
    """Write data and reward into ``folder``, and return what ``coupler`` is given."""
    rows = [{"prompt": f"what is {i} + 2 ?", "answer": str(i + 2)} for i in range(6)]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)

    given = {
        "model.path": reference.folder,
        "run_dir": folder / "run",
        "data.source": data,
        "reward.target": f"{folder / 'reward.py'}:score",
        **SETTINGS,
    }
    evaluated = [f"eval.data.source={data}"] if "eval.every_steps=3" in overrides else []
    engine = [] if "engine=megatron" in overrides else ["engine=fsdp"]
    words = [*engine, *overrides, *evaluated, "rollout=sglang", "algorithm=grpo"]
    return ["train", *(f"{key}={value}" for key, value in given.items()), *words]


def logged(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "overrides",
    [
        (
            "offload=true",
            "sync.transport=tcp",
            "engine.lora_rank=4",
            "rollout.max_lora_rank=4",
            "eval.every_steps=3",
            "eval.temperature=1",
            "eval.top_p=0.9",
            *MASKED,
        ),
        (
            "max_staleness=1",
            "algorithm.correction_cap=2",
            "sync.in_flight=recompute",
            "rollout.mode=server",
            "engine.lora_rank=4",
        ),
        pytest.param(("engine=megatron",), marks=pytest.mark.slow),
    ],
    ids=[
        "taking turns, with an adapter apart and sampling masks",
        "asynchronous, from a server, with the adapter merged",
        "from megatron",
    ],
)
def test_it_trains(
    tmp_path: Path, kernels: None, reference: TransformersReference, overrides: tuple[str, ...]
) -> None:
    assert main(arguments(tmp_path, reference, *overrides)) == 0
    log = logged(tmp_path)
    assert len(log) == 4
    assert log[0]["sync/probe"] < 1e-3 < 1e-2 < log[0]["sync/probe_permuted"]
    for step in log[1:]:
        # A batch older than the last sync judges nothing, so that the sync is probed.
        older = "train_infer/abs_diff" not in step
        assert step["sync/probe" if older else "train_infer/abs_diff"] < 1e-3
        assert step["train/grad_norm"] > 0

    if "rollout.max_lora_rank=4" in overrides:
        assert log[0]["sync/probe_adapter"] > 1e-2
        # The weights slept, so that they come again before A and B of 14 linear maps.
        assert {step["sync/tensors"] for step in log[1:]} == {len(reference.tensors) + 28}


@pytest.mark.slow
def test_the_experts_that_sampled_are_the_experts_that_train(
    tmp_path: Path, kernels: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """R3. Without the option the plan says what is missing."""
    experts = TransformersReference(write_qwen3_moe(tmp_path / "experts"))
    given = arguments(tmp_path, experts, "engine=megatron", "router_replay=R3")
    assert main(given) == 2
    assert "needs rollout=sglang to say which experts tokens go to" in capsys.readouterr().err

    assert main([*given, "rollout.routed_experts=true"]) == 0
    for step in logged(tmp_path)[1:]:
        # In fp32 both choose the same, but for ties.
        assert step["moe/route_disagreement"] < 0.05
        assert step["train_infer/abs_diff"] < 1e-3
        assert step["train/grad_norm"] > 0
