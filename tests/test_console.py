"""What a job shows: in a pipe, and in terminals of two widths."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from job_run import toy_train

from coupler.builtin.trackers.console import COLUMNS
from coupler.cli import main


def command(folder: Path) -> list[str]:
    """The arguments of a run that the console shows."""
    return toy_train(folder, "trackers=[console,jsonl]")


def in_terminal(arguments: list[str], columns: int) -> list[str]:
    """What a terminal is sent, line by line, without what moves the cursor."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "HF_HUB_OFFLINE": "1"}
    environment.pop("COLUMNS", None)
    job = subprocess.Popen(
        [sys.executable, "-m", "coupler", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)

    sent = b""
    try:
        while part := os.read(ours, 65536):
            sent += part
    except OSError:  # Linux says so that the other side was closed
        assert job.wait(60) == 0, sent.decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sent.decode())
    return [line.rstrip() for line in re.split(r"[\r\n]+", plain)]


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_shows_what_fits(columns: int, tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"  # The bar is drawn ten times a second.
    slow.write_text("import time\ndef score(completion):\n    time.sleep(0.2)\n    return 0.0\n")
    lines = in_terminal([*command(tmp_path), f"reward.target={slow}:score"], columns)
    steps = [line for line in lines if re.match("step +[1-9]  ", line)]
    assert len(steps) == 3
    assert all(len(line) <= columns for line in steps)
    assert all("reward" in line for line in steps)
    assert ("  lr " in steps[0]) == (columns == 120)

    bars = [line for line in lines if "\u2501" in line]
    assert all(len(line) <= columns for line in bars)
    assert any(re.search(r"\d\d +(start|prove|sample|train|sync|save)", bar) for bar in bars), bars
    assert "3/3 0:00:" in bars[-1]


def test_the_last_lines_say_what_to_type_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path)) == 0
    printed = capsys.readouterr().out
    kept = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]

    assert printed.index("coupler: loading the policy") < printed.index("step    1")
    ended = printed[printed.index("reward of samples") :]
    first, last = (f"{kept[at]['reward/mean']:.4g}" for at in (1, -1))
    assert f"{first} first, {last} last" in ended
    assert f"coupler show {tmp_path / 'run'}\n" in ended
    assert f"export             {tmp_path / 'run' / 'export'}\n" in ended
    assert "loss" not in ended

    assert main(command(tmp_path)) == 0
    assert "is complete at step 3" in capsys.readouterr().out


def test_quiet_and_verbose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = command(tmp_path)
    assert main([words[0], "-q", *words[1:]]) == 0
    quiet = capsys.readouterr().out
    assert "step    1" in quiet and "coupler: loading" not in quiet

    assert main(["plugins", "-q", "-v"]) == 2
    assert "argument -v: not allowed with argument -q" in capsys.readouterr().err


def test_the_console_shows_every_step_and_its_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hold each printed figure against the value that the other tracker wrote."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert main(command(tmp_path)) == 0

    shown = {
        int(number): line
        for number, line in re.findall(r"^step +(\d+)  (.*)$", capsys.readouterr().out, re.M)
    }
    kept = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert {1, 2, 3} <= shown.keys() <= {step["step"] for step in kept}

    for step in kept[1:]:
        line = shown[step["step"]]
        columns = [(heading, form, step[name]) for name, heading, form in COLUMNS if name in step]
        for heading, form, value in columns:
            if heading != "loss":  # hidden beside a reward
                assert f"{heading} {form.format(value)}" in line, (heading, line)
        assert "reward " in line
        assert "loss" not in line


def test_a_run_outlives_who_reads_its_console(tmp_path: Path) -> None:
    """A pipe that is closed after one line, in a locale that lacks most letters."""
    job = subprocess.Popen(
        [sys.executable, "-m", "coupler", *command(tmp_path), "samples.every_steps=1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": "1"},
    )
    assert job.stdout and job.stdout.readline()
    job.stdout.close()
    _, said = job.communicate(timeout=200)
    assert job.returncode in (0, 141) and b"Traceback" not in said, said
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4
    assert (tmp_path / "run" / "export").is_dir()


def test_a_run_outlives_a_full_disk_behind_its_console(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        job = subprocess.run(
            [sys.executable, "-m", "coupler", *command(tmp_path)],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            timeout=200,
        )
    assert job.returncode in (0, 2) and b"Traceback" not in job.stderr, job.stderr
    assert (tmp_path / "run" / "export").is_dir()
