"""A job as a user starts it, on a small Qwen2: arguments, data, a reward, and how to
read what it leaves behind.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coupler.cli import main
from coupler.testing.models import write_tokenizer, write_toy

REWARD = """
def score(completion, answer):
    return len(set(completion)) / (1 + len(completion)) + (answer in completion)
"""
COMMON = (
    "data.max_prompt_tokens=64", "engine=fsdp", "engine.dtype=fp32", "engine.lr=1e-2",
    "engine.max_tokens_per_gpu=256", "trackers=[console,jsonl,tensorboard]",
)  # fmt: skip
SAMPLING = ("rollout=hf", "rollout.dtype=fp32", "sampling.max_tokens=8", "samples_per_prompt=4")
MEASURED = (
    "time/",
    "memory/",
)  # what two equal runs may differ in; deterministic=true has no memory/


def write_inputs(folder: Path) -> None:
    """``rows.jsonl`` and ``reward.py``."""
    rows = [
        {"prompt": f"what is {i} + 2 ?", "answer": str(i + 2), "difficulty": i % 2}
        for i in range(6)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)


def arguments(job: str, model: Path, inputs: Path, run_dir: Path) -> list[str]:
    """The command line of ``job``, three steps if it trains."""
    given = [
        job,
        *COMMON,
        f"model.path={model}",
        f"run_dir={run_dir}",
        f"data.source={inputs / 'rows.jsonl'}",
    ]
    if job == "sft":
        return [*given, "algorithm=sft", "steps=3", "prompts_per_step=4"]
    scored = [*given, *SAMPLING, f"reward.target={inputs / 'reward.py'}:score"]
    held_out = [f"eval.data.source={inputs / 'rows.jsonl'}", "eval.data.max_prompt_tokens=64"]
    return (
        [*scored, *held_out]
        if job == "eval"
        else [*scored, "algorithm=grpo", "steps=3", "prompts_per_step=2"]
    )


def toy_train(folder: Path, *more: str) -> list[str]:
    """The command line of three steps on the toy backends, inputs in ``folder``."""
    write_inputs(folder)
    write_tokenizer(write_toy(folder / "toy"))
    return [
        "train", "engine=toy", "engine.lr=0.1", "rollout=toy", "algorithm=toy", "steps=3",
        "prompts_per_step=2", "samples_per_prompt=4", "sampling.max_tokens=8",
        "data.max_prompt_tokens=64", "trackers=[jsonl]",
        f"model.path={folder / 'toy'}", f"data.source={folder / 'rows.jsonl'}",
        f"reward.target={folder / 'reward.py'}:score", f"run_dir={folder / 'run'}", *more,
    ]  # fmt: skip


def run(job: str, model: Path, run_dir: Path, *overrides: str) -> Path:
    """Run ``job`` with inputs of its own beside ``run_dir``; return ``run_dir``."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    write_inputs(run_dir.parent)
    assert main([*arguments(job, model, run_dir.parent, run_dir), *overrides]) == 0
    return run_dir


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """One mapping a step, as the jsonl tracker wrote it."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def reproducible(run_dir: Path, but: tuple[str, ...] = MEASURED) -> list[dict[str, float]]:
    """:func:`metrics` without what a clock or the system measured."""
    return [{k: v for k, v in line.items() if not k.startswith(but)} for line in metrics(run_dir)]


def replayed(
    run_dir: Path, step: int, stage: str, capsys: pytest.CaptureFixture[str]
) -> dict[str, list[float]]:
    """What ``coupler replay`` prints: by name, what was recorded, what it is now, and
    their difference.
    """
    capsys.readouterr()
    assert main(["replay", str(run_dir), "--step", str(step), "--stage", stage]) == 0
    printed = [line.partition(" recorded ") for line in capsys.readouterr().out.splitlines()]
    return {
        name.strip(): [float(word) for word in rest.split()[::2]]
        for name, found, rest in printed
        if found
    }
