"""Supervised training on conversations from its command line, with validation, epochs
and an early end.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from job_run import metrics
from transformers import AutoModelForCausalLM, AutoTokenizer

from coupler.cli import main
from coupler.run.overview import look_at

SAID = ("the answer is 3 .", "yes", "maybe", "hello world")


def write_conversations(folder: Path, number: int = 6) -> None:
    """``train.jsonl`` and ``held_out.jsonl``, conversations of two turns each."""
    for name, first in (("train", 0), ("held_out", 100)):
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"what is {first + i} ?"},
                    {"role": "assistant", "content": SAID[i % 4]},
                    {"role": "user", "content": "hello"},
                    {"role": "assistant", "content": SAID[(i + 1) % 4]},
                ],
                "data_source": ("even", "odd")[i % 2],
            }
            for i in range(number)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def arguments(model: Path, folder: Path, name: str, *options: str) -> list[str]:
    """The command line of a run in ``folder / name``, of two rows a step."""
    given = {option.partition("=")[0] for option in options}
    usual = (
        "engine=fsdp", "engine.dtype=fp32", "engine.lr=3e-3", "engine.max_tokens_per_gpu=256",
        "algorithm=sft", f"model.path={model}", f"run_dir={folder / name}", "strict=true",
        f"data.source={folder / 'train.jsonl'}", "prompts_per_step=2", "steps=3",
    )  # fmt: skip
    ours = [option for option in usual if option.partition("=")[0] not in given]
    skipped = ("steps=3",) if "epochs" in given else ()
    return ["sft", *(option for option in ours if option not in skipped), *options]


def run(model: Path, folder: Path, name: str, *options: str) -> list[dict[str, float]]:
    """The metrics of such a run."""
    if not (folder / "train.jsonl").exists():
        write_conversations(folder)
    assert main(arguments(model, folder, name, *options)) == 0
    return metrics(folder / name)


def held_out(folder: Path, *options: str) -> tuple[str, ...]:
    return (f"eval.data.source={folder / 'held_out.jsonl'}", *options)


def saved(folder: Path, name: str) -> list[str]:
    return sorted(path.name for path in (folder / name / "checkpoints").iterdir())


def test_a_run_of_epochs_evaluates_and_saves_at_their_ends(model: Path, tmp_path: Path) -> None:
    write_conversations(tmp_path, 5)
    lines = run(
        model,
        tmp_path,
        "run",
        "epochs=2",
        "checkpoint.every_epochs=1",
        *held_out(tmp_path, "eval.every_epochs=1", "eval.at_start=true"),
    )

    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert [line["step"] for line in lines if "eval/loss" in line] == [0, 3, 5]
    assert saved(tmp_path, "run") == ["step_3", "step_5"]
    assert [line["epochs"] for line in lines] == [0, 0.4, 0.8, 1.2, 1.6, 2]
    losses = [line["eval/loss"] for line in lines if "eval/loss" in line]
    assert losses[0] > losses[1] > losses[2]


def test_a_run_ends_early_where_the_loss_no_longer_falls(model: Path, tmp_path: Path) -> None:
    """Of a metric that rises with the step, every value but the first is worse."""
    patient = (
        "eval.every_steps=1",
        "eval.patience=2",
        "steps=9",
        "engine.lr=0.3",  # with which the held-out loss explodes
        "checkpoint.best_metric=eval/loss",
        "checkpoint.lower_is_better=true",
        "checkpoint.keep_best=1",
        "checkpoint.keep_last=1",
        "checkpoint.every_steps=1",
    )
    lines = run(model, tmp_path, "run", *held_out(tmp_path, *patient))
    losses = [line["eval/loss"] for line in lines]
    best = losses.index(min(losses))
    assert len(losses) == best + 3 < 9, "two evaluations after the best one"
    assert saved(tmp_path, "run") == [f"step_{step}" for step in sorted({best + 1, best + 3})]
    card = (tmp_path / "run" / "export" / "README.md").read_text()
    assert f"| steps | {best + 3} |" in card
    assert look_at(tmp_path / "run").state == "done"

    again = run(model, tmp_path, "run", *held_out(tmp_path, *patient))
    assert again == lines, "the same command trains no further"


def test_a_run_goes_on_exactly(model: Path, tmp_path: Path) -> None:
    """In the middle of an epoch, with weights of rows and validation."""
    options = ("checkpoint.every_steps=1", *held_out(tmp_path, "eval.every_steps=2"))
    whole = run(model, tmp_path, "whole", "steps=5", *options)
    for steps in (2, 3, 5):
        run(model, tmp_path, "parts", f"steps={steps}", *options)
    parts = metrics(tmp_path / "parts")
    names = ("step", "loss", "train/grad_norm", "epochs")
    assert [[line[n] for n in names] for line in parts] == [
        [line[n] for n in names] for line in whole
    ]
    assert parts[-1]["eval/loss"] == whole[-1]["eval/loss"]


def test_a_weight_multiplies_the_loss_of_its_row(model: Path, tmp_path: Path) -> None:
    """Two rows of weights 3 and 0 have the gradient of the first row, times 3 / 2."""
    write_conversations(tmp_path, 4)
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    alike = [json.loads(lines[i]) for i in (0, 2)]
    for row in alike:
        row["messages"] = row["messages"][:2]
        row["messages"][1]["content"] = "yes"

    def norm(name: str, rows: list[dict[str, object]]) -> float:
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        size = f"prompts_per_step={len(rows)}"
        (line,) = run(model, tmp_path, name, "steps=1", size)
        return line["train/grad_norm"]

    alone = norm("alone", alike[:1])
    weighted = norm("weighted", [{**alike[0], "weight": 3}, {**alike[1], "weight": 0}])
    assert weighted == pytest.approx(1.5 * alone, rel=1e-5)


def test_the_numbers_of_a_validation_are_those_of_transformers(model: Path, tmp_path: Path) -> None:
    line, _ = run(model, tmp_path, "run", "steps=1", *held_out(tmp_path, "eval.at_start=true"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model).float()
    surprise, count = 0.0, 0
    for text in (tmp_path / "held_out.jsonl").read_text().splitlines():
        messages = json.loads(text)["messages"]
        ids = torch.tensor(tokenizer.apply_chat_template(messages, return_dict=False))
        with torch.no_grad():
            found = network(ids[None]).logits[0].log_softmax(-1)
        for k in (2, 4):
            asked = tokenizer.apply_chat_template(
                messages[: k - 1], add_generation_prompt=True, return_dict=False
            )
            told = tokenizer.apply_chat_template(messages[:k], return_dict=False)
            end = len(told) - len(tokenizer.encode("\n", add_special_tokens=False))
            places = range(len(asked), end)
            surprise -= sum(found[i - 1, ids[i]].item() for i in places)
            count += len(places)

    assert line["eval/nll"] == pytest.approx(surprise / count, rel=1e-5)
    assert line["eval/loss"] == pytest.approx(surprise / count, rel=1e-5)
    assert line["eval/perplexity"] == pytest.approx(np.exp(surprise / count), rel=1e-4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("epochs=1", "steps=7"), "epochs=1 is 3 steps of prompts_per_step=2 over 6 rows, and"),
        (("eval.every_steps=1",), "eval.data.source is empty"),
        (("eval.patience=1",), "checkpoint.best_metric=eval/reward needs evaluations that sample"),
        (
            (
                "eval.patience=1",
                "checkpoint.best_metric=eval/nll",
                "checkpoint.lower_is_better=true",
            ),
            "eval.patience needs eval/nll: set eval.every_steps, or checkpoint.best_metric to",
        ),
        (
            ("checkpoint.keep_best=1", "checkpoint.best_metric=nll"),
            "checkpoint.best_metric=nll falls: set checkpoint.lower_is_better=true.",
        ),
        (("epochs=1", "data.sampler=x.py:X"), "epochs counts epochs, which data.sampler=x.py:X"),
        (("data.truncation=sideways",), "data.truncation"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: tuple[str, ...],
    text: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_conversations(tmp_path)
    assert main(arguments(model, tmp_path, "run", *options)) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_of_steps_and_epochs_the_command_line_counts(model: Path, tmp_path: Path) -> None:
    write_conversations(tmp_path)
    config = tmp_path / "run.yaml"
    for written, given, steps in (("epochs: 2", "steps=1", 1), ("steps: 9", "epochs=0.5", 2)):
        config.write_text(written)
        name = given.partition("=")[0]
        command = [text for text in arguments(model, tmp_path, name) if text != "steps=3"]
        assert main([*command, "--config", str(config), given]) == 0
        assert len(metrics(tmp_path / name)) == steps
