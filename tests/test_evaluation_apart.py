"""A run evaluates with a rollout of its own, on the toy backends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coupler.cli import main
from coupler.testing.models import write_tokenizer, write_toy

ROWS = "".join(json.dumps({"prompt": f"{i} + 2", "answer": str(i)}) + "\n" for i in range(6))
REWARD = "def score(completion):\n    return len(set(completion)) / (1 + len(completion))\n"


def arguments(folder: Path, *more: str) -> list[str]:
    """Return the command line of a run on the toy backends that evaluates."""
    write_tokenizer(write_toy(folder / "model"))
    (folder / "rows.jsonl").write_text(ROWS)
    (folder / "reward.py").write_text(REWARD)
    return [
        "engine=toy", "engine.lr=1.0", "rollout=toy", "algorithm=toy", "steps=3",
        f"model.path={folder / 'model'}", f"run_dir={folder / 'run'}",
        f"data.source={folder / 'rows.jsonl'}", "data.max_prompt_tokens=64",
        f"reward.target={folder / 'reward.py'}:score", "prompts_per_step=2",
        "samples_per_prompt=2", "sampling.max_tokens=12", "deterministic=true", "strict=true",
        f"eval.data.source={folder / 'rows.jsonl'}", "eval.data.max_prompt_tokens=64",
        "eval.every_steps=1", "eval.at_start=true", "eval.temperature=1", "trackers=[jsonl]", *more,
    ]  # fmt: skip


def evaluations(folder: Path, *more: str) -> list[dict[str, float]]:
    """Train, and return the metrics of evaluation of every step."""
    folder.mkdir(exist_ok=True)
    assert main(["train", *arguments(folder, *more)]) == 0
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [{k: v for k, v in line.items() if k.startswith("eval/")} for line in found]


def test_a_rollout_of_its_own_evaluates_with_the_weights_of_the_step(tmp_path: Path) -> None:
    shared = evaluations(tmp_path / "shared")
    apart = evaluations(tmp_path / "apart", "eval.rollout=toy")

    assert len({step["eval/reward"] for step in shared}) > 1, "training changes the answers"
    for step in apart:
        assert step.pop("eval/sync/probe") < 1e-6
    assert apart[0].pop("eval/sync/probe_permuted") > 1e-2
    assert apart == shared


def test_a_resumed_run_brings_its_own_rollout_the_weights_again(tmp_path: Path) -> None:
    whole = evaluations(tmp_path / "whole", "eval.rollout=toy")
    evaluations(tmp_path / "cut", "eval.rollout=toy", "steps=2")
    again = evaluations(tmp_path / "cut", "eval.rollout=toy", "strict=false")
    assert "eval/sync/probe_permuted" in again[-1], "the first push of a process is proved"
    assert again[-1]["eval/reward"] == whole[-1]["eval/reward"]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("eval.rollout=toy", "offload=true"), "offload=true and eval.rollout=toy"),
        (("eval.rollout=toy", "eval.rollout.replicas=2"), "set executor=ray, or eval.rollout.repl"),
        (("eval.rollout=none",), "eval.rollout=none: no rollout named 'none' is installed"),
        (("eval.rollout.replicas=2",), "try:  eval.rollout=NAME"),
    ],
)
def test_what_a_rollout_of_evaluations_cannot_do_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], sentence: str
) -> None:
    assert main(["train", *arguments(tmp_path, *more)]) == 2
    assert sentence in capsys.readouterr().err


def test_an_evaluation_alone_samples_with_rollout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(tmp_path, "eval.rollout=toy")
    assert main(["eval", *given]) == 2
    assert "eval.rollout=toy is of coupler train: here rollout samples" in capsys.readouterr().err
