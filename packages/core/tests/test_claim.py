"""A run folder has one process at a time, and a process that ends in any way lets it
go.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from coupler.errors import ConfigError
from coupler.run.run_lock import claimed
from coupler.system.log import get_logger

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
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout
    child = int(holder.stdout.readline())
    try:
        who = (
            f"in use by process {holder.pid} on {socket.gethostname()}; nothing in it was touched."
        )
        with pytest.raises(ConfigError, match=who), claimed(tmp_path / "run"):
            pass
    finally:
        holder.kill()
        holder.wait(10)
    try:
        with claimed(tmp_path / "run"):
            assert (
                tmp_path / "run" / ".lock"
            ).read_text() == f"process {os.getpid()} on {socket.gethostname()}"
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
    flock, calls = fcntl.flock, []

    def late(file: int, operation: int) -> None:
        calls.append(file)
        if len(calls) == 1:
            (tmp_path / ".lock").unlink()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with claimed(tmp_path):
        assert len(calls) == 2 and (tmp_path / ".lock").exists()
        with pytest.raises(ConfigError, match="in use by"), claimed(tmp_path):
            pass


def test_without_locks_a_run_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(_file: int, _operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    for number in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
        with claimed(tmp_path / "run"):
            pass
        warned = (
            f"coupler: warning: no lock keeps a second process out of run_dir={tmp_path / 'run'}: "
        )
        assert capsys.readouterr().err == f"{warned}{os.strerror(number)}\n"
        assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sentence = r"^run_dir=.*file/run cannot be written: Not a directory\."
    with pytest.raises(ConfigError, match=sentence), claimed(tmp_path / "file" / "run"):
        pass


def test_messages_are_kept_with_their_time_beside_what_a_run_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = get_logger("coupler.test")
    with claimed(tmp_path):
        (tmp_path / "config.yaml").touch()
        log.info("going on")
        log.warning("something is off")
        log.debug("nobody asked for this")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("coupler: going on\n", "coupler: warning: something is off\n")
    first, second = (tmp_path / "coupler.log").read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO coupler\.test: going on", first)
    assert second.endswith(" WARNING coupler.test: something is off")
    log.info("after the run")
    assert "after the run" not in (tmp_path / "coupler.log").read_text()


def test_a_copy_of_a_run_by_hard_links_keeps_its_messages(tmp_path: Path) -> None:
    (tmp_path / "coupler.log").write_text("before\n")
    os.link(tmp_path / "coupler.log", tmp_path / "copy.log")
    with claimed(tmp_path):
        (tmp_path / "config.yaml").touch()
        get_logger("coupler.test").info("after")
    assert (tmp_path / "copy.log").read_text() == "before\n"
    assert (tmp_path / "coupler.log").read_text().startswith("before\n2")


def test_messages_alone_leave_no_folder(tmp_path: Path) -> None:
    with claimed(tmp_path / "run"):
        get_logger("coupler.test").info("nothing was done")
        assert (tmp_path / "run" / "coupler.log").exists()
    assert list(tmp_path.iterdir()) == []
