"""``coupler train engine=fsdp rollout=sglang``, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coupler.cli import main
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


@pytest.mark.parametrize(
    "overrides",
    [
        (
            "offload=true",
            "sync.transport=tcp",
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
    ],
    ids=[
        "taking turns, with sampling masks",
        "asynchronous, from a server, with the adapter merged",
    ],
)
def test_it_trains(
    tmp_path: Path, kernels: None, reference: TransformersReference, overrides: tuple[str, ...]
) -> None:
    rows = [{"prompt": f"what is {i} + 2 ?", "answer": str(i + 2)} for i in range(6)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)

    given = {
        "model.path": reference.folder,
        "run_dir": tmp_path / "run",
        "data.source": data,
        "reward.target": f"{tmp_path / 'reward.py'}:score",
        **SETTINGS,
    }
    evaluated = [f"eval.data.source={data}"] if "eval.every_steps=3" in overrides else []
    backends = ["engine=fsdp", "rollout=sglang", "algorithm=grpo"]
    words = [*backends, *(f"{key}={value}" for key, value in given.items()), *evaluated]
    assert main(["train", *words, *overrides]) == 0

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    log = [json.loads(line) for line in lines]
    assert len(log) == 4
    assert log[0]["sync/probe"] < 1e-3 < 1e-2 < log[0]["sync/probe_permuted"]
    for step in log[1:]:
        # A batch older than the last sync judges nothing, so that the sync is probed.
        older = "train_infer/abs_diff" not in step
        assert step["sync/probe" if older else "train_infer/abs_diff"] < 1e-3
        assert step["train/grad_norm"] > 0
