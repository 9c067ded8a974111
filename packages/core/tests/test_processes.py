"""Processes are told apart, seen to be stopped, and ended with their folder's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coupler.system.processes import Process, end_all_of, watch_over

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")
HOLDS = (
    "import sys, time; file = open(sys.argv[1], sys.argv[2]); print(1, flush=True); time.sleep(600)"
)


@pytest.fixture
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as child:
        yield child
        child.kill()


def until(ready: object, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not ready():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.01)


def holding(path: Path, mode: str = "a") -> subprocess.Popen[bytes]:
    """Start a process that has ``path`` open."""
    path.write_text("")
    child = subprocess.Popen([sys.executable, "-c", HOLDS, str(path), mode], stdout=subprocess.PIPE)
    assert child.stdout and child.stdout.readline()
    return child


def test_a_stopped_process_is_seen_and_killed(sleeping: subprocess.Popen[bytes]) -> None:
    process = Process.of(sleeping.pid)
    assert not process.is_stopped() and not process.has_ended()
    sleeping.send_signal(signal.SIGSTOP)
    until(process.is_stopped)
    process.kill()
    assert sleeping.wait(10) == -signal.SIGKILL
    assert process.has_ended() and process.state == ""
    process.kill()


def test_a_number_that_is_used_again_is_another_process(sleeping: subprocess.Popen[bytes]) -> None:
    other = Process(sleeping.pid, Process.of(sleeping.pid).born - 1)
    assert other.has_ended() and not other.is_stopped()
    other.kill()
    time.sleep(0.1)
    assert sleeping.poll() is None


def test_what_writes_in_a_folder_is_ended_and_nothing_else(
    sleeping: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one-more").mkdir()
    held, other = holding(tmp_path / "one" / "file"), holding(tmp_path / "one-more" / "file")
    reader = holding(tmp_path / "one" / "file", "r")
    held.send_signal(signal.SIGSTOP)
    ended = end_all_of(tmp_path / "one", 0.2)
    assert [process.pid for process in ended] == [held.pid]
    assert held.wait(10) == -signal.SIGKILL
    assert other.poll() is None and reader.poll() is None and sleeping.poll() is None
    assert end_all_of(tmp_path / "one", 5.0) == []
    other.kill()
    reader.kill()


def test_what_ends_itself_in_time_is_not_killed(tmp_path: Path) -> None:
    child = holding(tmp_path / "file")
    child.send_signal(signal.SIGTERM)
    assert end_all_of(tmp_path, 20.0) == []
    assert child.wait(10) == -signal.SIGTERM


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_watcher_ends_what_is_left_when_its_process_ends(tmp_path: Path, how: str) -> None:
    left = holding(tmp_path / "file")
    if how == "closed":
        watcher = watch_over(tmp_path, 0.0)
        assert watcher.stdin
        watcher.stdin.close()
        assert watcher.wait(20) == 0
    else:
        text = (
            "import os, signal, sys; from pathlib import Path; "
            "from coupler.system.processes import watch_over; "
            "watch_over(Path(sys.argv[1]), 0.0); os.kill(os.getpid(), signal.SIGKILL)"
        )
        killed = subprocess.run([sys.executable, "-c", text, str(tmp_path)], check=False)
        assert killed.returncode == -signal.SIGKILL
    assert left.wait(20) == -signal.SIGKILL


def test_this_process_is_left_alone(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w"):
        assert end_all_of(tmp_path, 0.0) == []
    assert os.getpid()
