"""Rows, their sources and their order."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coupler.config.schema import DataConfig
from coupler.data import Codec, PromptStream, Row, fingerprint, load_rows
from coupler.errors import CouplerError, DataError
from coupler.interfaces import Model

RECORDS: list[dict[str, Any]] = [
    {"prompt": "1 + 2", "answer": "3", "level": 1, "tags": ["odd"]},
    {"prompt": "2 + 2", "answer": "4", "level": 2},
]
COMMON: list[dict[str, Any]] = [
    {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": "1 + 2"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"split": "train", "index": 4},
    }
]


def write(path: Path, records: list[Any]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(r) for r in records) + "\n\n")
    else:
        path.write_text(json.dumps(records))
    return str(path)


@pytest.mark.parametrize("records", [RECORDS, COMMON])
def test_every_format_gives_the_same_rows(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    sources = [
        write(tmp_path / f"data{suffix}", records) for suffix in (".jsonl", ".json", ".parquet")
    ]
    jsonl, as_list, parquet = (load_rows(DataConfig(source=s)) for s in sources)
    assert jsonl == as_list == parquet
    assert fingerprint(jsonl) == fingerprint(parquet)


def test_columns_become_rows(tmp_path: Path) -> None:
    rows = load_rows(DataConfig(source=write(tmp_path / "a.jsonl", RECORDS)))
    assert rows == [
        Row("1 + 2", "3", 0, {"level": 1, "tags": ["odd"]}),
        Row("2 + 2", "4", 1, {"level": 2}),
    ]
    (row,) = load_rows(DataConfig(source=write(tmp_path / "b.jsonl", COMMON)))
    assert row.prompt == ({"role": "user", "content": "1 + 2"},)
    assert row.answer == "3"
    assert row.extra["extra_info"] == {"split": "train", "index": 4}


def test_keys_limits_and_answers(tmp_path: Path) -> None:
    source = write(
        tmp_path / "a.jsonl",
        [{"q": "x", "a": 72}, {"q": "y", "a": {"target": [1]}}, {"q": "z", "a": "t"}],
    )
    rows = load_rows(DataConfig(source=source, prompt_key="q", answer_key="a", limit=2))
    assert [(r.prompt, r.answer) for r in rows] == [("x", "72"), ("y", '{"target": [1]}')]
    assert [
        r.answer for r in load_rows(DataConfig(source=source, prompt_key="q", answer_key=""))
    ] == ["", "", ""]


def test_the_fingerprint_sees_every_change() -> None:
    base = Row("p", "a", 0, {"x": 1})
    rows = [
        [base],
        [Row("q", "a", 0, {"x": 1})],
        [Row("p", "b", 0, {"x": 1})],
        [Row("p", "a", 0, {"x": 2})],
        [base, base],
    ]
    assert len({fingerprint(r) for r in rows}) == len(rows)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "is empty"),
        ("\n\n", "has no rows"),
        ('{"prompt": "x", "answer": ""}\n\n{"prompt": "x"', "line 3 is not JSON"),
        (b'{"prompt": "\xff"}', "line 1 is not JSON"),
        ('["x"]', "line 1 is a list, not a mapping"),
        (
            '{"promt": "x", "answer": ""}',
            r"line 1 has no 'prompt' - did you mean data.prompt_key=promt\?\n  it has:  promt",
        ),
        (
            '{"prompt": "x", "answers": ""}',
            r"line 1 has no 'answer' - did you mean data.answer_key=answers",
        ),
        ('{"prompt": "x", "reward_model": {}}', r"has no 'answer'"),
        ('{"prompt": " ", "answer": ""}', "'prompt' is empty"),
        ('{"prompt": [], "answer": ""}', "'prompt' has no messages"),
        ('{"prompt": [{"role": "user", "content": ""}], "answer": ""}', "'prompt' is empty"),
        ('{"prompt": 3, "answer": ""}', "'prompt' is a int; it must be a string or a list"),
        ('{"prompt": [{"role": "user"}], "answer": ""}', "needs a role and a content"),
        ('{"prompt": ["x"], "answer": ""}', "needs a role and a content"),
        (
            '{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": ""}',
            "both strings",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str | bytes, what: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(DataError, match=what) as error:
        load_rows(DataConfig(source=str(path)))
    assert "train.jsonl" in str(error.value)


def test_a_bad_source_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.parquet").write_text("not parquet at all")
    (tmp_path / "x.json").write_text('{"rows": []}')
    (tmp_path / "empty").mkdir()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    (tmp_path / "gen.py").write_text("def rows(n): return [{'prompt': 'x'}, 3]\nvalue = 3")
    for config, what in (
        (DataConfig(), "data.source is not set"),
        (DataConfig(source="no.jsonl"), "there is no file no.jsonl"),
        (DataConfig(source="x.parquet"), "is not Parquet"),
        (DataConfig(source="x.json"), "holds a dict, not a list"),
        (DataConfig(source="x.xlsx"), "is nothing that can be read"),
        (DataConfig(source="saved"), "pip install datasets"),
        (DataConfig(source="empty"), "is a folder without a file of rows"),
        (DataConfig(source="x.json", args={"n": 1}), "data.args has n, but"),
        (DataConfig(source="no_such_module:rows"), "cannot be imported"),
        (DataConfig(source="gen.py:value"), "is a int, not a function"),
        (
            DataConfig(source="gen.py:rows", args={"m": 1}),
            r"(?s)data.args does not fit.*it takes:  \(n\)",
        ),
        (DataConfig(source="gen.py:rows", args={"n": 1}), r"row 0 \(from 0\) has no 'answer'"),
        (
            DataConfig(source="gen.py:rows", args={"n": 1}, answer_key=""),
            r"row 1 \(from 0\) is a int, not a mapping",
        ),
    ):
        with pytest.raises(DataError, match=what):
            load_rows(config)


def from_function(num: int) -> Any:
    """A source, found by this module's name."""
    for i in range(num):
        yield {
            "prompt": ({"role": "user", "content": "x"},),
            "answer": np.int64(i),
            "when": datetime.date(2026, 1, 2),
            "price": Decimal("1.5"),
            "array": np.arange(2),
            "nested": {1: np.float32(0.5)},
            "none": None,
        }


def test_a_function_yields_rows_which_become_plain() -> None:
    rows = load_rows(DataConfig(source=f"{__file__}:from_function", args={"num": 3}, limit=2))
    extra = {"when": "2026-01-02", "price": "1.5", "array": [0, 1], "nested": {"1": 0.5}}
    assert rows == [Row(({"role": "user", "content": "x"},), str(i), i, extra) for i in range(2)]
    assert json.loads(json.dumps(rows[0].extra)) == extra


def test_what_json_cannot_hold_is_named(tmp_path: Path) -> None:
    source = write(tmp_path / "a.parquet", [{"prompt": "x", "answer": "y", "image": b"png"}])
    with pytest.raises(DataError, match=r"row 0 \(from 0\) holds a bytes"):
        load_rows(DataConfig(source=source))


def take(stream: PromptStream[int], num: int) -> list[int]:
    return [stream.next() for _ in range(num)]


def test_an_epoch_holds_every_row_once_in_an_order_of_its_own() -> None:
    drawn = take(PromptStream(range(50), seed=1, shuffle=True), 150)
    epochs = [drawn[i : i + 50] for i in (0, 50, 100)]
    assert all(sorted(e) == list(range(50)) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3
    assert drawn == take(PromptStream(range(50), seed=1, shuffle=True), 150)
    assert drawn != take(PromptStream(range(50), seed=2, shuffle=True), 150)
    assert take(PromptStream(range(3), seed=1, shuffle=False), 7) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("drawn", [0, 3, 10, 11, 25, 30])
def test_a_restored_stream_goes_on_exactly(drawn: int) -> None:
    whole = PromptStream(range(10), seed=3, shuffle=True)
    take(whole, drawn)
    state = json.loads(json.dumps(whole.state()))
    resumed = PromptStream(range(10), seed=3, shuffle=True)
    take(resumed, 4)
    resumed.restore(state)
    assert take(resumed, 25) == take(whole, 25)


def test_a_model_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    for path, what in (
        ("", "is no folder"),
        (str(tmp_path / "no"), "is no folder"),
        (str(tmp_path), "no tokenizer"),
    ):
        with pytest.raises(CouplerError, match=rf"model\.path=.*{what}"):
            Codec(Model(path))


def test_importing_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, coupler.data, coupler.rewards.worker; print([m for m in sys.modules "
        "if '.' not in m])"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert not [
        m
        for m in ("torch", "transformers", "ray", "pyarrow", "reasoning_gym")
        if f"'{m}'" in loaded
    ]


def test_limits_do_not_exhaust_an_endless_source(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(
        "def rows():\n    while True: yield {'prompt': 'x', 'answer': 'y'}"
    )
    rows = load_rows(DataConfig(source=f"{tmp_path}/endless.py:rows", limit=5))
    assert [r.index for r in islice(rows, 10)] == [0, 1, 2, 3, 4]
