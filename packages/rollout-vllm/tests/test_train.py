"""``coupler train engine=fsdp rollout=vllm``, as a user types it."""

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


def arguments(folder: Path, reference: TransformersReference, *overrides: str) -> list[str]:
    """Write data and reward into ``folder``; return what ``coupler`` is called with."""
    rows = [{"prompt": f"what is {i} + 2 ?", "answer": str(i + 2)} for i in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return [
        "train", "engine=fsdp", "rollout=vllm", "algorithm=grpo", f"model.path={reference.folder}",
        f"run_dir={folder / 'run'}", f"data.source={folder / 'rows.jsonl'}", "data.max_prompt_tokens=64",
        f"reward.target={folder / 'reward.py'}:score", "engine.dtype=fp32", "engine.lr=1e-2",
        "engine.max_tokens_per_gpu=256", "rollout.dtype=fp32", "sampling.max_tokens=8", "samples_per_prompt=4",
        "prompts_per_step=2", "steps=3", "strict=true", "trackers=[console,jsonl]", *overrides,
    ]  # fmt: skip


def logged(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def run(folder: Path, reference: TransformersReference, *overrides: str) -> list[dict[str, float]]:
    assert main(arguments(folder, reference, *overrides)) == 0
    return logged(folder)


@pytest.mark.parametrize(
    "overrides",
    [
        ("sync.transport=disk", "offload=true"),
        # nccl: over gloo, on the CPU
        ("max_staleness=1", "algorithm.correction_cap=2", "sync.in_flight=recompute", "sync.transport=nccl"),
        ("engine.lora_rank=4", "sync.transport=tcp"),
    ],
    ids=["taking turns", "asynchronous", "with the adapter merged"],
)
def test_it_trains(tmp_path: Path, reference: TransformersReference, overrides: tuple[str, ...]) -> None:
    log = run(tmp_path, reference, *overrides)
    assert len(log) == 4
    assert log[0]["sync/probe"] < 1e-3 < 1e-2 < log[0]["sync/probe_permuted"]
    for step in log[1:]:
        # a batch older than the last sync judges nothing, so that the sync is probed
        older = "max_staleness=1" in overrides and "train_infer/abs_diff" not in step
        assert step["sync/probe" if older else "train_infer/abs_diff"] < 1e-3
        assert step["train/grad_norm"] > 0


def test_a_wrong_argument_of_the_engine_is_one_sentence(
    tmp_path: Path, reference: TransformersReference, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):
        run(tmp_path, reference, "rollout.extra_args.no_such_argument=3")
    printed = capsys.readouterr().err
    assert "did not start" in printed and "no_such_argument" in printed
    assert "Traceback" not in printed
