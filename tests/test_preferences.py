"""Preference runs from rows to an export: DPO, IPO, KTO, online DPO, and a reward model
that scores a GRPO run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job_run import COMMON, metrics, replayed, reproducible, run
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from coupler.batch import Batch
from coupler.batch.trajectory import Origin, Segment, Trajectory
from coupler.cli import main
from coupler.data.preferences import Labelled, pack_labelled
from coupler.testing.models import read_tensors

ASKED = [f"what is {i} + 2 ?" for i in range(6)]
PAIRS = [{"prompt": p, "chosen": str(i + 2), "rejected": "no"} for i, p in enumerate(ASKED)]
LABELS = [
    {"prompt": p, "completion": "no" if i % 2 else str(i + 2), "label": not i % 2}
    for i, p in enumerate(ASKED)
]


def write(path: Path, rows: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(model: Path, run_dir: Path, rows: Sequence[Any], algorithm: str) -> list[str]:
    source = write(run_dir.parent / f"{run_dir.name}.jsonl", rows)
    return [
        "sft", *COMMON, f"model.path={model}", f"run_dir={run_dir}", f"data.source={source}",
        f"algorithm={algorithm}", "steps=6", "prompts_per_step=4", "engine.lr=3e-3",
        "strict=true",
    ]  # fmt: skip


def prefer(
    model: Path, run_dir: Path, *overrides: str, rows: Sequence[Any] = PAIRS, algorithm: str = "dpo"
) -> list[dict[str, float]]:
    assert main([*command(model, run_dir, rows, algorithm), *overrides]) == 0
    return metrics(run_dir)


def logprob(folder: Path, prompt: str, answer: str) -> float:
    """The log-prob of an answer with the end of its turn, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    asked = [{"role": "user", "content": prompt}]
    start = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    end = tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False)
    with torch.no_grad():
        logits = model(torch.tensor([[*start, *end]])).logits[0, len(start) - 1 : -1]
    return float(logits.log_softmax(-1).gather(1, torch.tensor(end)[:, None]).sum())


def compared(line: dict[str, float]) -> dict[str, float]:
    """The numbers of a step that no layout changes.

    Before the first step margins are 0 but for rounding, and so is their sign.
    """
    kept = ("loss", "rewards/", "logps/", "kto/")
    return {k: v for k, v in line.items() if k.startswith(kept) and k != "rewards/accuracy"}


@pytest.mark.parametrize("algorithm", ["dpo", "ipo"])
def test_a_run_learns_what_is_preferred(model: Path, tmp_path: Path, algorithm: str) -> None:
    more = ("algorithm.beta=0.5", "steps=12", "engine.lr=1e-4")
    found = prefer(model, tmp_path / "run", *more, algorithm=algorithm)
    first, last = found[0], found[-1]
    assert first["loss"] == pytest.approx(np.log(2) if algorithm == "dpo" else 1, rel=1e-5)
    assert first["rewards/margin"] == pytest.approx(0, abs=1e-5)
    # That of IPO converges to 1 / 2.
    assert last["rewards/margin"] > 0.2 and last["rewards/accuracy"] == 1
    assert logprob(tmp_path / "run" / "export", ASKED[1], "no") < logprob(model, ASKED[1], "no")


def test_the_numbers_are_those_of_transformers(model: Path, tmp_path: Path) -> None:
    """Of the second step, against log-probs of the start and of the first step's
    export.
    """
    more = ("prompts_per_step=6", "algorithm.beta=0.5", "data.shuffle=false")
    prefer(model, tmp_path / "one", *more, "steps=1")
    found = prefer(model, tmp_path / "two", *more, "steps=2")[1]
    moved = {
        side: [
            logprob(tmp_path / "one" / "export", row["prompt"], row[side])
            - logprob(model, row["prompt"], row[side])
            for row in PAIRS
        ]
        for side in ("chosen", "rejected")
    }
    for side, ratios in moved.items():
        assert found[f"rewards/{side}"] == pytest.approx(0.5 * np.mean(ratios), abs=1e-4), side
    margins = 0.5 * (np.array(moved["chosen"]) - np.array(moved["rejected"]))
    assert found["loss"] == pytest.approx(np.log1p(np.exp(-margins)).mean(), abs=1e-4)


def test_micro_batches_change_no_number(model: Path, tmp_path: Path) -> None:
    """Three pairs at once, or each alone in as many tokens as it has."""
    several = prefer(model, tmp_path / "several", "engine.max_tokens_per_gpu=60")
    for one, other in zip(prefer(model, tmp_path / "whole"), several, strict=True):
        same = compared(one)
        assert {name: other[name] for name in same} == pytest.approx(same, rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_two_ranks_change_no_number(
    model: Path, tmp_path: Path, cluster: str, algorithm: str
) -> None:
    rows = LABELS if algorithm == "kto" else PAIRS
    on_ray = ("executor=ray", f"ray.address={cluster}", "ray.devices=cpu", "engine.ranks=2")
    chosen = {"rows": rows, "algorithm": algorithm}
    one = prefer(model, tmp_path / "one", "steps=3", **chosen)
    two = prefer(
        model, tmp_path / "two", "steps=3", *on_ray, "engine.max_tokens_per_gpu=60", **chosen
    )
    for first, second in zip(one, two, strict=True):
        same = compared(first)
        assert {name: second[name] for name in same} == pytest.approx(same, rel=1e-3, abs=1e-4)
    got, want = (read_tensors(tmp_path / name / "export") for name in ("two", "one"))
    for name, tensor in want.items():
        np.testing.assert_allclose(got[name], tensor, atol=2e-4, err_msg=name)


def whole(prompt: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def said(text: str) -> list[dict[str, str]]:
    return whole("", text)[1:]


FORMS = {
    "messages": [
        {"prompt": whole(r["prompt"], "")[:1], **{s: said(r[s]) for s in ("chosen", "rejected")}}
        for r in PAIRS
    ],
    "shared beginning": [
        {side: whole(r["prompt"], r[side]) for side in ("chosen", "rejected")} for r in PAIRS
    ],
    "both": [
        {"prompt": r["prompt"], **{s: whole(r["prompt"], r[s]) for s in ("chosen", "rejected")}}
        for r in PAIRS
    ],
    "an answer too": [{**r, "answer": "7"} for r in PAIRS],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_rows_is_the_same_run(model: Path, tmp_path: Path, form: str) -> None:
    prefer(model, tmp_path / "plain", "steps=2")
    prefer(model, tmp_path / "other", "steps=2", rows=FORMS[form])
    assert reproducible(tmp_path / "other") == reproducible(tmp_path / "plain")


def test_columns_have_other_names(model: Path, tmp_path: Path) -> None:
    rows = [{"q": r["prompt"], "pair": {"good": r["chosen"], "bad": r["rejected"]}} for r in PAIRS]
    names = ("prompt=q", "chosen=pair.good", "rejected=pair.bad")
    prefer(model, tmp_path / "plain", "steps=2")
    mapped = [f"data.columns.{name}" for name in names]
    prefer(model, tmp_path / "other", "steps=2", *mapped, rows=rows)
    assert reproducible(tmp_path / "other") == reproducible(tmp_path / "plain")


def test_an_adapter_is_its_own_reference(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = prefer(model, tmp_path / "run", "engine.lora_rank=4")
    assert "reference (engine" not in "".join(capsys.readouterr())
    assert found[0]["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert found[-1]["rewards/margin"] > 0.01


def test_kto_takes_labels(model: Path, tmp_path: Path) -> None:
    found = prefer(model, tmp_path / "run", "algorithm.beta=0.5", rows=LABELS, algorithm="kto")
    assert found[0]["loss"] == pytest.approx(0.5, rel=1e-5)
    assert all(line["kto/reference_point"] >= 0 for line in found)
    assert found[-1]["rewards/desirable"] > found[-1]["rewards/undesirable"] + 0.3


REFUSED = {
    "no-chosen": (
        "dpo",
        [{"prompt": "a", "rejected": "b"}],
        "has no 'chosen'",
        "it has:  prompt, rejected",
    ),
    "no-column": ("dpo", [{"prompt": "a", "picked": "b"}], "'chosen'", "data.columns.chosen"),
    "no-prompt": ("dpo", [{"chosen": "a", "rejected": "b"}], "has no 'prompt'", "it has:"),
    "empty": ("dpo", [{**PAIRS[0], "chosen": ""}], "'chosen' is empty", ""),
    "a-number": ("dpo", [{**PAIRS[0], "chosen": 3}], "'chosen' must be a text", ""),
    "two-turns": (
        "dpo",
        [{**PAIRS[0], "chosen": [*said("3"), *whole("4", "5")]}],
        "one more of the assistant",
        "",
    ),
    "margin": ("reward_model", [{**PAIRS[0], "margin": "x"}], "'margin' must be a number", ""),
    "label": ("kto", [{**LABELS[0], "label": "good"}], "'label' must be true or false", ""),
    "no-label": ("kto", [{"prompt": "a", "completion": "b"}], "'label'", "data.columns.label"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_odd_rows_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    algorithm, rows, *parts = REFUSED[name]
    others = [{"prompt": "x", "picked": "y"}] if name == "no-column" else [PAIRS[1] | LABELS[1]]
    given = command(model, tmp_path / "run", [*rows, *others], algorithm)
    assert main(given) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in parts), error
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


ODD_OPTIONS = {
    "algorithm.beta=0": "algorithm.beta=0.0 must be above 0",
    "algorithm.label_smoothing=0.5": "must be at least 0 and below 0.5",
    "algorithm.loss=hinge algorithm.label_smoothing=0.1": "belongs to algorithm.loss=sigmoid",
    "algorithm.sft_coef=-1": "algorithm.sft_coef=-1.0 must not be negative",
    "algorithm=kto prompts_per_step=1": "set prompts_per_step=2 or more",
    "algorithm=kto algorithm.desirable_weight=-1": "must not be negative; 1 is usual",
    "algorithm=reward_model algorithm.centering_coef=-1": "must not be negative: 0 switches",
    "algorithm=online_dpo": "is for coupler train, not for coupler sft",
    "engine.max_tokens_per_gpu=30": "pairs are longer than engine.max_tokens_per_gpu=30",
}


@pytest.mark.parametrize("options", ODD_OPTIONS)
def test_odd_options_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str
) -> None:
    rows = LABELS if "kto" in options else PAIRS
    given = command(model, tmp_path / "run", rows, "dpo")
    assert main([*given, *options.split()]) == 2
    assert ODD_OPTIONS[options] in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", ["dpo", "kto", "reward_model"])
def test_the_doctor_reads_the_rows_of_the_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str
) -> None:
    rows = LABELS if algorithm == "kto" else PAIRS
    given = command(model, tmp_path / "run", rows, algorithm)[1:]
    assert main(["doctor", "data", *given]) == 0, capsys.readouterr()
    lost = "label" if algorithm == "kto" else "rejected"
    broken = write(
        tmp_path / "broken.jsonl", [*rows, {k: v for k, v in rows[0].items() if k != lost}]
    )
    assert main(["doctor", "data", *given, f"data.source={broken}"]) == 2
    assert f"no {lost!r}" in capsys.readouterr().out


# --- reward models


def scored(folder: Path, prompt: str, answer: str) -> float:
    """The score of a conversation, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).float().eval()
    ids = tokenizer.apply_chat_template(
        whole(prompt, answer), return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        return float(model(**ids).logits[0, 0])


@pytest.fixture(scope="module")
def reward_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "run"
    more = ("steps=20", "algorithm.centering_coef=0.01", "checkpoint.every_steps=10")
    found = prefer(model, folder, *more, algorithm="reward_model")
    assert found[0]["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert found[-1]["rewards/accuracy"] == 1 and found[-1]["rewards/margin"] > 1
    return folder


def test_a_trained_reward_model_is_a_classifier(reward_model: Path) -> None:
    export = reward_model / "export"
    config = json.loads((export / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]
    assert "score.bias" not in read_tensors(export)
    for row in PAIRS:
        assert scored(export, row["prompt"], row["chosen"]) > scored(
            export, row["prompt"], row["rejected"]
        )


def test_a_checkpoint_of_it_exports_the_same(reward_model: Path, tmp_path: Path) -> None:
    assert main(["export", str(reward_model), "--out", str(tmp_path / "out")]) == 0
    want = read_tensors(reward_model / "export")
    for name, tensor in read_tensors(tmp_path / "out").items():
        np.testing.assert_array_equal(tensor, want[name], err_msg=name)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]


def test_it_scores_a_run_of_grpo(model: Path, reward_model: Path, tmp_path: Path) -> None:
    """The reward of an evaluated completion is the score that transformers gives it."""
    export = reward_model / "export"
    folder = run(
        "train", model, tmp_path / "run", "algorithm=grpo", "algorithm.kl=none", "steps=2",
        f"reward_model.model.path={export}", "reward.target=", "eval.at_start=true",
        f"eval.data.source={tmp_path / 'rows.jsonl'}", "eval.data.max_prompt_tokens=64",
        "eval.every_steps=2", "strict=true",
    )  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for line in (folder / "eval_0.jsonl").read_text().splitlines():
        sample = json.loads(line)
        want = scored(export, rows[sample["row"]]["prompt"], sample["completion"])
        assert sample["reward"] == pytest.approx(want, abs=1e-4)
    assert metrics(folder)[-1]["reward_model/invalid_rate"] == 0


# --- pairs of samples


def test_online_dpo_trains_on_the_best_and_the_worst(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(
        "train", model, tmp_path / "run", "algorithm=online_dpo", "steps=3", "engine.lr=1e-3",
        "record.every_steps=1", "optimizer_steps_per_batch=2", "strict=true",
    )  # fmt: skip
    found = metrics(folder)[1:]
    assert len(found) == 3 and found[0]["rewards/margin"] == pytest.approx(0, abs=2)
    for step, line in enumerate(found, 1):
        batch = Batch.load(folder / "record" / f"step_{step}" / "batch.npz")
        assert len(batch) == 4 and line["batch/trajectories"] == 8, "two of four are trained on"
        for pair in np.unique(batch["unit"]):
            rows = batch.take(np.flatnonzero(batch["unit"] == pair))
            assert len(np.unique(rows["group"])) == 1 and sorted(rows["chosen"]) == [False, True]
            best, worst = rows["reward"][rows["chosen"]], rows["reward"][~rows["chosen"]]
            assert best > worst
        assert line["reward/min"] <= batch["reward"].min()
        assert line["reward/max"] == batch["reward"].max()
    for stage in ("advantages", "train"):
        again = replayed(folder, 1, stage, capsys)
        assert again and all(abs(difference) < 1e-5 for *_, difference in again.values()), again


def test_mismatched_rows_join_other_prompts_that_fit() -> None:
    def labelled(prompt: int, completion: int, room: int) -> Labelled:
        segments = (
            Segment((prompt,) * 3, Origin.PROMPT),
            Segment((completion,) * completion, Origin.TARGET),
        )
        return Labelled(Trajectory(segments), True, room)

    room = 7
    rows = [labelled(1, 2, room), labelled(1, 3, room), labelled(2, 9, room), labelled(3, 4, room)]
    batch = pack_labelled(rows)
    assert batch["mismatched"].tolist() == [False] * 4 + [True] * 4
    joined = [one["tokens"].tolist() for one in batch.split([np.array([i]) for i in range(4, 8)])]
    assert joined == [[1] * 3 + [4] * 4, [1] * 3 + [4] * 4, [2] * 3 + [4] * 4, [3] * 3 + [2] * 2]
    assert not pack_labelled(rows[:2])["mismatched"].any(), "both have one prompt"
