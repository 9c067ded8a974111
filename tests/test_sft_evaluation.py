"""Supervised training that samples answers to held-out prompts and scores them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job_run import MEASURED, metrics, reproducible
from test_supervised import arguments, held_out, write_conversations

from coupler.cli import main
from coupler.data import Row
from coupler.jobs.sft_evaluation import question

REWARD = "def score(completion, answer):\n    return float(completion.strip() == answer)\n"
SAMPLED = ("rollout=hf", "rollout.dtype=fp32", "sampling.max_tokens=12")


def options(folder: Path, *more: str) -> tuple[str, ...]:
    """What makes a run of conversations evaluate by sampling."""
    if not (folder / "train.jsonl").exists():
        write_conversations(folder)
        (folder / "reward.py").write_text(REWARD)
    return (*SAMPLED, f"reward.target={folder / 'reward.py'}:score", *held_out(folder), *more)


def run(model: Path, folder: Path, name: str, *more: str) -> list[dict[str, float]]:
    """The metrics of such a run, in ``folder / name``."""
    given = options(folder, *more)
    assert main(arguments(model, folder, name, *given)) == 0
    return metrics(folder / name)


def scored(folder: Path, step: int) -> list[dict[str, Any]]:
    path = folder / f"eval_{step}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_policy_answers_with_the_weights_of_the_step(model: Path, tmp_path: Path) -> None:
    """As it does in ``coupler eval`` of what the run exports."""
    longer = ("steps=12", "eval.every_steps=6", "eval.at_start=true")
    lines = run(model, tmp_path, "run", *longer)
    found = [line for line in lines if "eval/reward" in line]
    assert [line["step"] for line in found] == [0, 6, 12]
    assert all("eval/loss" in line and line["eval/sync/probe"] < 1e-3 for line in found)
    assert found[0]["eval/reward"] < found[-1]["eval/reward"]

    last = scored(tmp_path / "run", 12)
    assert sum(each["reward"] for each in last) / len(last) == found[-1]["eval/reward"]
    (tmp_path / "asked.jsonl").write_text(
        "".join(
            json.dumps({"prompt": row["messages"][:-1], "answer": row["messages"][-1]["content"]})
            + "\n"
            for row in map(json.loads, (tmp_path / "held_out.jsonl").read_text().splitlines())
        )
    )
    assert main([
        "eval", "engine=fsdp", "engine.dtype=fp32", f"model.path={tmp_path / 'run' / 'export'}",
        *SAMPLED, f"reward.target={tmp_path / 'reward.py'}:score", f"run_dir={tmp_path / 'eval'}",
        f"eval.data.source={tmp_path / 'asked.jsonl'}",
    ]) == 0  # fmt: skip
    again = [json.loads(line) for line in (tmp_path / "eval" / "eval.jsonl").open()]
    assert [each["completion"] for each in again] == [each["completion"] for each in last]


def test_a_run_goes_on_exactly(model: Path, tmp_path: Path) -> None:
    often = ("eval.every_steps=2", "checkpoint.every_steps=1", "deterministic=true")
    run(model, tmp_path, "whole", "steps=5", *often)
    for steps in (2, 3, 5):
        run(model, tmp_path, "parts", f"steps={steps}", *often)

    ours, theirs = (
        reproducible(tmp_path / name, (*MEASURED, "run/", "eval/sync/probe_permuted"))
        for name in ("parts", "whole")
    )
    evaluated = [n for n, line in enumerate(theirs) if "eval/reward" in line]
    assert evaluated == [1, 3, 4]
    # the parts end with evaluations of their own
    ours[2] = {n: v for n, v in ours[2].items() if not n.startswith(("eval/", "reward/"))}
    assert ours == theirs


def test_a_run_ends_early_where_answers_get_no_better(model: Path, tmp_path: Path) -> None:
    lines = run(
        model, tmp_path, "run", "steps=9", "eval.every_steps=1", "eval.patience=2",
        "engine.lr=1e-9", "checkpoint.best_metric=eval/reward",
    )  # fmt: skip
    assert len(lines) == 3


def test_preferences_are_evaluated_by_sampling(model: Path, tmp_path: Path) -> None:
    given = options(tmp_path, "eval.every_steps=2", "steps=2")
    pairs = [{"prompt": f"{i} ?", "chosen": "yes", "rejected": "no"} for i in range(6)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    asked = [{"prompt": f"{i} ?", "answer": "yes"} for i in range(4)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))

    of_pairs = (
        "algorithm=dpo", f"data.source={tmp_path / 'pairs.jsonl'}", "offload=true",
        f"eval.data.source={tmp_path / 'asked.jsonl'}",
    )  # fmt: skip
    assert main(arguments(model, tmp_path, "run", *given, *of_pairs)) == 0
    last = metrics(tmp_path / "run")[-1]
    assert "eval/reward" in last and "eval/loss" not in last
    assert len(scored(tmp_path / "run", 2)) == 4


def test_a_conversation_asks_for_its_last_answer() -> None:
    said = (
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "5"},
    )
    found = question(Row(said, "", 0, {}))
    assert (found.prompt, found.answer) == (said[:3], "4")
    plain = Row("1", "2", 0, {})
    assert question(plain) is plain


REFUSED = {
    "no reward": (("reward.target=",), "reward.target is empty"),
    "a rollout of evaluations": (
        ("rollout@eval.rollout=hf",),
        "eval.rollout=hf is of coupler train",
    ),
    "torchrun": (("executor=torchrun",), "executor=torchrun starts engines alone"),
    "a score": (("algorithm=reward_model",), "has rows of another form"),
    "cut prompts": (("eval.data.truncation=left",), "eval.data.truncation=left is of supervised"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_sampled_is_one_sentence(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    more, sentence = REFUSED[case]
    given = arguments(model, tmp_path, "run", *options(tmp_path, "eval.every_steps=2"), *more)
    if case == "a score":
        pair = {"prompt": "1", "chosen": "yes", "rejected": "no"}
        (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
        given.append(f"data.source={tmp_path / 'pairs.jsonl'}")
    assert main(given) == 2
    assert sentence in capsys.readouterr().err


def test_without_evaluations_a_rollout_is_not_started(model: Path, tmp_path: Path) -> None:
    """One configuration serves training on answers and on samples."""
    write_conversations(tmp_path)
    given = [o for o in arguments(model, tmp_path, "run", *SAMPLED) if o != "strict=true"]
    assert main(given) == 0
    assert "eval/reward" not in metrics(tmp_path / "run")[-1]
