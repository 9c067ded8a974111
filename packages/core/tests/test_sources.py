"""Several files of rows: patterns, lists, and folders with splits and shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coupler.data import load_rows
from coupler.data.options import DataConfig
from coupler.errors import DataError


def write(path: Path, *prompts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [{"prompt": prompt, "answer": "a"} for prompt in prompts]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))


def prompts(**options: Any) -> list[Any]:
    return [row.prompt for row in load_rows(DataConfig(**options))]


LAYOUTS = {
    "hub": ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet",
            "data/test-00000-of-00001.parquet"],
    "flat": ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "test.parquet"],
    "folders": ["train/0000.parquet", "train/0001.parquet", "test/0000.parquet"],
    "words": ["my_train_a.jsonl", "my_train_b.jsonl", "my_test.jsonl"],
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_has_splits(tmp_path: Path, layout: str) -> None:
    folder = tmp_path / "set"
    for name, prompt in zip(LAYOUTS[layout], ("one", "two", "three"), strict=True):
        write(folder / name, prompt)
    (folder / "README.md").write_text("a card")
    (folder / "dataset_infos.json").write_text("{}")

    source = str(folder)
    assert prompts(source=source, split="train") == ["one", "two"]
    assert prompts(source=source, split="test") == ["three"]
    with pytest.raises(DataError, match=r"has several splits: .*\n  try:  data.split=train"):
        prompts(source=source)
    with pytest.raises(DataError, match=r"(?s)no such split.*did you mean:  data.split=train"):
        prompts(source=source, split="trian")


def test_files_whose_names_tell_no_split_are_one(tmp_path: Path) -> None:
    for name, prompt in (("part-0.jsonl", "a"), ("part-1.jsonl", "b")):
        write(tmp_path / "set" / name, prompt)
    assert prompts(source=str(tmp_path / "set")) == ["a", "b"]
    assert prompts(source=str(tmp_path / "set"), split="train") == ["a", "b"]


def test_other_files_of_a_folder_are_no_data(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    write(folder / "train.parquet", "a")
    (folder / "metadata.json").write_text('{"rows": 1}')
    assert prompts(source=str(folder)) == ["a"]
    write(folder / "train.jsonl", "a")
    with pytest.raises(DataError, match=r"has files of train as .jsonl and .parquet.\n  try:  "):
        prompts(source=str(folder))


def test_the_only_split_needs_no_choice(tmp_path: Path) -> None:
    write(tmp_path / "set" / "data" / "validation-00000-of-00001.parquet", "a")
    assert prompts(source=str(tmp_path / "set")) == ["a"]


def test_patterns_and_lists_are_read_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.parquet", "c.jsonl", "odd[1].jsonl"):
        write(tmp_path / name, name)
    assert prompts(source="*.jsonl") == ["b.jsonl", "c.jsonl", "odd[1].jsonl"]
    assert prompts(source=["c.jsonl", "a.*", "b.jsonl"]) == ["c.jsonl", "a.parquet", "b.jsonl"]
    assert prompts(source=["c.jsonl", "b.jsonl"], limit=1) == ["c.jsonl"]
    assert prompts(source="odd[1].jsonl") == ["odd[1].jsonl"]
    (last,) = load_rows(DataConfig(source=["c.jsonl", "b.jsonl"]))[1:]
    assert last.index == 1


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", "a")
    (tmp_path / "a.xlsx").write_text("x")
    write(tmp_path / "main" / "train-00000-of-00003.parquet", "a")
    write(tmp_path / "hub" / "main" / "train.jsonl", "a")
    write(tmp_path / "hub" / "socratic" / "train.jsonl", "a")

    for options, said in (
        ({"source": "no*.jsonl"}, "data.source=no*.jsonl matches no file"),
        ({"source": "a.*"}, "data.source=a.xlsx is nothing that can be read"),
        ({"source": ["a.jsonl", "b.jsonl"]}, "there is no file b.jsonl"),
        ({"source": ["a.jsonl", "x.mod:rows"]}, "lists x.mod:rows, and a function stands alone"),
        ({"source": "a.jsonl", "split": "train"}, "data.split=train, but data.source=a.jsonl"),
        ({"source": "main"}, "2 of the 3 shards of train in main are missing, the first is"),
        ({"source": "hub"}, "its folders have: main, socratic.\n  try:  data.source=hub/main"),
        ({"source": []}, "data.source is not set"),
    ):  # fmt: skip
        with pytest.raises(DataError) as error:
            prompts(**options)
        assert said in str(error.value)
