"""Runs on rows whose columns have other names are those on rows with the usual ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from job_run import arguments, reproducible, write_inputs

from coupler.cli import main

MAPPING = ("columns.prompt=question", "columns.answer=reward_model.ground_truth")


def renamed(folder: Path) -> None:
    """Give ``rows.jsonl`` the columns of verl's data."""
    path = folder / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    other = [
        {
            "question": row["prompt"],
            "difficulty": row["difficulty"],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        }
        for row in rows
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in other))


@pytest.mark.parametrize("job", ["train", "sft", "eval"])
def test_a_run_on_mapped_columns_is_the_same(job: str, model: Path, tmp_path: Path) -> None:
    runs = []
    for name in ("usual", "mapped"):
        folder = tmp_path / name
        folder.mkdir()
        write_inputs(folder)
        given = arguments(job, model, folder, folder / "run")
        if name == "mapped":
            renamed(folder)
            key = "eval.data" if job == "eval" else "data"
            given += [f"{key}.{text}" for text in MAPPING]
        assert main(given) == 0
        runs.append(reproducible(folder / "run"))
    assert runs[0] == runs[1]


def test_another_mapping_is_other_data(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    renamed(tmp_path)
    run_dir = tmp_path / "run"
    given = [*arguments("train", model, tmp_path, run_dir), "record.every_steps=1"]
    mapping = [f"data.{text}" for text in MAPPING]
    assert main([*given, *mapping]) == 0
    capsys.readouterr()

    other = [mapping[0], "data.columns.answer=question", "steps=4"]
    assert main([*given, *other]) == 2
    said = capsys.readouterr().err
    assert "differs:  data.columns was {'prompt': 'question', 'answer': 'reward_model" in said
    assert "checkpoint.reset_data=true to go on with it" in said
    assert main([*given, *other, "checkpoint.reset_data=true"]) == 0

    for command in (["show", str(run_dir), "--step", "2"], ["replay", str(run_dir), "--step", "4"]):
        assert main(command) == 0
    assert capsys.readouterr().out


def test_several_files_are_one_source(model: Path, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    for number, part in enumerate((lines[:2], lines[2:])):
        (tmp_path / f"part-{number}.jsonl").write_text("".join(part))

    given = arguments("sft", model, tmp_path, tmp_path / "one")
    assert main(given) == 0
    sources = (f"[{tmp_path}/part-0.jsonl,{tmp_path}/part-1.jsonl]", f"'{tmp_path}/part-*.jsonl'")
    for name, source in zip(("list", "pattern"), sources, strict=True):
        run_dir = tmp_path / name
        assert main([*given, f"data.source={source}", f"run_dir={run_dir}"]) == 0
        assert reproducible(run_dir) == reproducible(tmp_path / "one")
