"""Columns of a source under the names that a run reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coupler.data import Row, load_rows
from coupler.data.options import DataConfig
from coupler.errors import DataError

# A row as verl writes it.
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1 + 2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "3"},
    "extra_info": {"split": "train", "index": 7, "answer": "1 + 2 = 3", "tools_kwargs": {"f": {}}},
}


def rows(
    folder: Path, records: list[dict[str, Any]], key: str = "data", **config: Any
) -> list[Row]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return load_rows(DataConfig(source=str(path), **config), key)


def test_columns_get_the_names_that_a_run_reads(tmp_path: Path) -> None:
    record = {"question": "1 + 2?", "solution": 3, "set": "sums", "args": {"f": {"a": 1}}, "n": 1}
    mapping = {
        "prompt": "question",
        "answer": "solution",
        "data_source": "set",
        "tools_kwargs": "args",
    }
    (row,) = rows(tmp_path, [record], columns=mapping)
    assert row == Row(
        "1 + 2?", "3", 0, {"n": 1, "data_source": "sums", "tools_kwargs": {"f": {"a": 1}}}
    )
    (old,) = rows(tmp_path, [record], prompt_key="question", answer_key="solution")
    assert (old.prompt, old.answer) == (row.prompt, row.answer)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_dot_leads_into_a_nested_column(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pq.write_table(
            pa.Table.from_pylist([{**VERL, "extra_info": {"answer": "1 + 2 = 3"}}]), path
        )
    else:
        path.write_text(json.dumps(VERL))

    def answer(column: str) -> str:
        (row,) = load_rows(DataConfig(source=str(path), columns={"answer": column}))
        assert row.extra["reward_model"] == VERL["reward_model"]
        return row.answer

    assert answer("extra_info.answer") == "1 + 2 = 3"
    assert answer("reward_model.ground_truth") == "3"


def test_a_name_with_a_dot_may_be_a_column_itself(tmp_path: Path) -> None:
    record = {"a.b": "as it stands", "a": {"b": "nested", "c": {"d": "deep"}}}
    assert rows(tmp_path, [record], columns={"prompt": "a.b"}, answer_key="")[0].prompt == (
        "as it stands"
    )
    assert rows(tmp_path, [record], columns={"prompt": "a.c.d"}, answer_key="")[0].prompt == "deep"


def test_a_renamed_column_hides_one_of_its_new_name(tmp_path: Path) -> None:
    record = {"prompt": "p", "answer": "a", "data_source": "old", "set": "new"}
    (row,) = rows(
        tmp_path, [record], columns={"prompt": "answer", "answer": "prompt", "data_source": "set"}
    )
    assert (row.prompt, row.answer, dict(row.extra)) == ("a", "p", {"data_source": "new"})


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (
            {"prompt": "question"},
            "line 1 has no 'question'.\n  try:  data.columns.prompt=COLUMN\n  it has:  "
            "data_source, prompt, ability, reward_model.style, reward_model.ground_truth, extra_",
        ),
        (
            {"answer": "reward_model.truth"},
            "line 1 has no 'reward_model.truth' - did you mean "
            "data.columns.answer=reward_model.ground_truth?",
        ),
        (
            {"tools_kwargs": "extra_info.tool_kwargs"},
            "no row has 'extra_info.tool_kwargs' - did you mean "
            "data.columns.tools_kwargs=extra_info.tools_kwargs?",
        ),
        ({"answer": "ability.x"}, "line 1 has no 'ability.x'"),
    ],
)
def test_a_column_that_is_not_there_is_named_with_those_that_are(
    tmp_path: Path, columns: dict[str, str], said: str
) -> None:
    record = {**VERL, "extra_info": {"split": "train", "tools_kwargs": {"f": 1}}}
    with pytest.raises(DataError) as error:
        rows(tmp_path, [record], columns=columns)
    assert said in str(error.value) and "set by:  data.source=" in str(error.value)
    with pytest.raises(DataError, match=r"eval\.data\.columns"):
        rows(tmp_path, [record], "eval.data", columns=columns)


def test_a_column_of_some_rows_is_enough(tmp_path: Path) -> None:
    records = [{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": "d", "kw": {"f": {}}}]
    found = rows(tmp_path, records, columns={"tools_kwargs": "kw"})
    assert [dict(row.extra) for row in found] == [{}, {"tools_kwargs": {"f": {}}}]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"columns": {"prompt": "q"}, "prompt_key": "x"},
            "prompt_key=x contradicts columns.prompt=q",
        ),
        ({"columns": {"prompt": ""}}, "columns takes names of columns, got '' for prompt"),
        ({"source": 3}, "source takes text or a list of texts, got 3"),
        ({"source": ["a.jsonl", ""]}, "source lists an empty text"),
        ({"source": ["a.jsonl", 1]}, "source takes text or a list of texts"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DataConfig(**options)


def test_a_message_that_calls_tools_needs_no_content(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    prompt = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    (row,) = rows(tmp_path, [{"prompt": prompt, "answer": ""}])
    assert row.prompt[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    with pytest.raises(DataError, match="each message needs a role and a content"):
        rows(tmp_path, [{"prompt": [{"role": "assistant", "content": None}], "answer": ""}])
