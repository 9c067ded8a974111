"""A run keeps what the policy wrote, and ``coupler show`` prints it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from job_run import toy_train

from coupler.cli import main
from coupler.run import samples
from coupler.system.terminal import columns, fold, harmless


def test_a_run_keeps_and_shows_its_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(toy_train(tmp_path, "samples.every_steps=2", "samples.max_groups=1")) == 0
    printed = capsys.readouterr()
    brief = (printed.out + printed.err).split("--- sample of step ")[1:]
    assert [text[0] for text in brief] == ["1", "1", "2", "2"]

    run, folder = tmp_path / "run", tmp_path / "run" / "samples"
    assert sorted(path.name for path in folder.iterdir()) == ["step_1.jsonl", "step_2.jsonl"]
    lines = samples.read(folder, 2)
    assert len(lines) == 4
    assert len({line["group"] for line in lines}) == 1
    assert abs(sum(line["advantage"] for line in lines)) < 1e-5
    rows = [json.loads(line)["prompt"] for line in (tmp_path / "rows.jsonl").open()]
    for line in lines:
        assert rows[line["row"]] in line["prompt"]
        assert line["version"] == [1, 1]
        assert line["finish"] in ("stop", "length")

    assert main(["show", str(run)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("--- group") == 4
    assert "[prompt] " in shown
    assert "[sampled] " in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert main(["show", str(run), "--step", "3"]) == 2
    assert "kept nothing of step 3" in capsys.readouterr().err
    assert main(["show", str(run), "--group", "99"]) == 2

    (folder / "step_2.jsonl").write_text('{"group": 1}\n')
    assert main(["show", str(run)]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_a_resumed_run_writes_the_steps_after_its_checkpoint_again(tmp_path: Path) -> None:
    often = ("samples.every_steps=1", "checkpoint.every_steps=1", "checkpoint.export=false")
    assert main(toy_train(tmp_path, *often, "steps=2")) == 0
    folder = tmp_path / "run" / "samples"
    kept = (folder / "step_1.jsonl").read_text()
    # A kill left them: the run never got to a checkpoint of step 9.
    (folder / "step_3.jsonl").write_text("old")
    (folder / "step_9.jsonl").write_text("old")

    assert main(toy_train(tmp_path, *often, "steps=3")) == 0
    assert samples.steps(folder) == [1, 2, 3]
    assert (folder / "step_1.jsonl").read_text() == kept
    assert len(samples.read(folder, 3)) == 8


def test_no_samples_are_kept_where_they_are_off(tmp_path: Path) -> None:
    assert main(toy_train(tmp_path, "samples.every_steps=0")) == 0
    assert not (tmp_path / "run" / "samples").exists()
    assert main(["show", str(tmp_path / "run")]) == 2


def test_hostile_text_cannot_move_the_cursor_or_the_margin() -> None:
    line = {"step": 1, "reward": 0.5, "finish": "stop", "prompt": "x" * 300 + "end"}
    text = samples.brief({**line, "completion": "\x1b[2J\r" + "漢" * 90})
    assert "\x1b" not in text
    assert all(columns(each) <= 80 for each in text.split("\n"))
    assert text.split("\n")[1].endswith("end")
    assert "".join(fold("漢" * 90)) == "漢" * 90


def test_a_recorded_step_cannot_move_the_cursor_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = toy_train(tmp_path, "record.every_steps=1", "steps=1")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text().replace("what is", "\\u001b[2Jwhat\\tis"))
    assert main(given) == 0
    capsys.readouterr()
    assert main(["show", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "log-prob" in shown and "\ufffd[2Jwhat\tis" in shown
    assert "\x1b" not in shown


def test_spaces_and_joiners_of_every_script_stay() -> None:
    text = "日本\u3000語 10\u202f%\u00a0a\tb\nक्\u200dष 👩\u200d🔬"
    assert harmless(f"{text}\r\n", lines=True) == f"{text}\n"
    assert harmless("क्\u200dष\u3000👩\u200d🔬") == "क्\u200dष 👩\u200d🔬"
    assert harmless("\x1b\x9b\u202e\r\u2028\ue000\ud800", lines=True) == "\ufffd" * 7
