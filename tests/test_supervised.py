"""Supervised training on conversations from its command line, with validation, epochs
and an early end.
"""

from __future__ import annotations

import json
from pathlib import Path

from job_run import metrics

from coupler.cli import main

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
