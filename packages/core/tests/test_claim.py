"""A run folder has one process at a time, and a process that ends in any way lets it go."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from coupler.errors import ConfigError
from coupler.run import run_lock as claim
from coupler.run.run_lock import claimed

HOLDS = """
import os, sys, time
from pathlib import Path
from coupler.run.run_lock import claimed

with claimed(Path(sys.argv[1])):
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    """Its children, which a fork gave the open file, do not count."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert holder.stdout
    child = int(holder.stdout.readline())
    try:
        who = f"in use by process {holder.pid} on {socket.gethostname()}; nothing in it was touched."
        with pytest.raises(ConfigError, match=who), claimed(tmp_path / "run"):
            pass
    finally:
        holder.kill()
        holder.wait(10)
    try:
        with claimed(tmp_path / "run"):
            assert (tmp_path / "run" / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    finally:
        os.kill(child, signal.SIGKILL)
    assert list((tmp_path / "run").iterdir()) == []


def test_only_a_folder_that_was_not_there_and_stays_empty_goes(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("mine", "used", "empty"):
        with claimed(tmp_path / name):
            if name == "used":
                (tmp_path / name / "config.yaml").touch()
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "used"}


def test_a_lock_file_that_its_holder_deletes_meanwhile_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening and locking it, that is."""
    take, calls = claim._take, []

    def late(file: object, folder: Path) -> None:
        calls.append(file)
        if len(calls) == 1:
            (folder / ".lock").unlink()
        take(file, folder)  # type: ignore[arg-type]

    monkeypatch.setattr(claim, "_take", late)
    with claimed(tmp_path):
        assert len(calls) == 2 and (tmp_path / ".lock").exists()
        with pytest.raises(ConfigError, match="in use by"), claimed(tmp_path):
            pass


def test_without_locks_a_run_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(claim, "fcntl", None)
    with claimed(tmp_path):
        pass
    assert f"warning: no lock keeps a second process out of run_dir={tmp_path}: " in capsys.readouterr().err
