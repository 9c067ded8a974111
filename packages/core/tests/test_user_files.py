"""Hashes of the files that options name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from coupler.run.user_files import hash_user_files, warn_of_changed_files


def test_every_option_that_names_a_file_counts(tmp_path: Path) -> None:
    for name in ("reward", "rows", "tools", "more"):
        (tmp_path / f"{name}.py").write_text(f"{name} = 1\n")
    resolved = yaml.safe_dump(
        {
            "reward": {"target": f"{tmp_path}/reward.py:score"},
            "data": {"sampler": f"{tmp_path}/rows.py:Rows", "source": "a.jsonl"},
            "environment": {
                "target": f"{tmp_path}/gone.py:Guess",
                "functions": [f"{tmp_path}/tools.py:look", "pkg.mod:f", f"{tmp_path}/more.py:go"],
                "url": "http://localhost:8000",
            },
        }
    )
    found = hash_user_files(resolved)
    assert list(found) == [
        f"data.sampler={tmp_path}/rows.py",
        f"environment.functions={tmp_path}/tools.py",
        f"environment.functions={tmp_path}/more.py",
        f"reward.target={tmp_path}/reward.py",
    ]
    assert len(set(found.values())) == 4


def test_the_question_to_a_judge_counts(tmp_path: Path) -> None:
    question = tmp_path / "question.txt"
    question.write_text("{completion}")
    resolved = yaml.safe_dump({"judge": {"prompt": str(question), "max_tokens": 8}})
    then = hash_user_files(resolved)
    question.write_text("Rate: {completion}")
    assert list(then) == [f"judge.prompt={question}"] and hash_user_files(resolved) != then
    assert hash_user_files(yaml.safe_dump({"judge": {"prompt": ""}})) == {}


def test_a_changed_file_is_named_and_a_new_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tools.py"
    file.write_text("a = 1\n")
    resolved = yaml.safe_dump({"environment": {"functions": [f"{file}:look"]}})
    then = hash_user_files(resolved)

    for older in (None, {}, then):
        warn_of_changed_files(older, resolved, 3)
    assert not caplog.records

    file.write_text("a = 2\n")
    warn_of_changed_files(then, resolved, 3)
    said = f"environment.functions={file} was changed since step 3, and is used as it is now"
    assert [record.message for record in caplog.records] == [said]


def test_a_pipe_in_the_place_of_a_file_is_left_out(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "reward.py")
    resolved = yaml.safe_dump({"reward": {"target": f"{tmp_path}/reward.py:score"}})
    assert hash_user_files(resolved) == {}
