"""Look at processes of this machine, and end them, through Linux' ``/proc``.

Elsewhere nothing is found, and nothing is ended.

``python processes.py FOLDER SECONDS`` waits until its stdin ends, as it does when the
process that holds the other side ends in whatever way. Then it ends all processes that
write in the folder. It imports the standard library only, so that it starts soon.
"""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Process:
    """A process, which no later one of the same number is taken for."""

    pid: int
    # clock ticks between the start of the machine and that of the process
    born: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return the process that has this number now.

        Its birth is 0 if none has.
        """
        fields = _stat(pid)
        return cls(pid, int(fields[19]) if fields else 0)

    @property
    def state(self) -> str:
        """The letter that ``ps`` shows.

        It is ``T`` for a process that was stopped, and empty if there is none.
        """
        fields = _stat(self.pid)
        return fields[0] if fields and int(fields[19]) == self.born else ""

    def is_stopped(self) -> bool:
        """Tell whether a signal, such as SIGSTOP or SIGTSTP, has stopped it."""
        return self.state == "T"

    def has_ended(self) -> bool:
        """Tell whether it runs no more, even if its parent has not heard of it."""
        return self.state in ("", "Z", "X")

    def kill(self) -> None:
        """End it, also where it is stopped. One that has ended is left alone."""
        if self.state:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


def queued_seconds(pid: int) -> float:
    """Return for how long the first thread of a process waited for a processor."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    # It may end while it is read, and some kernels do not count.
    except (OSError, IndexError, ValueError):
        return 0.0


def die_with_parent() -> None:
    """Let the system end this process with the thread that started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_all_of(folder: Path, seconds: float) -> list[Process]:
    """End every process of this user that writes in ``folder``, and return them.

    Such a process has a file of the folder open to write it, as its log. This one and
    its parent are left alone. The others have ``seconds`` to end themselves.
    """
    end = time.monotonic() + seconds
    while found := list(_writing_in(folder)):
        if time.monotonic() >= end:
            for process in found:
                process.kill()
            break
        time.sleep(POLL_S)

    while any(not process.has_ended() for process in found) and time.monotonic() < end + 1:
        time.sleep(POLL_S)
    return found


def watch_over(folder: Path, seconds: float) -> subprocess.Popen[bytes]:
    """Start a process that calls :func:`end_all_of` when this one ends.

    It does so too when its stdin is closed.
    """
    command = [sys.executable, "-I", "-S", __file__, str(folder), str(seconds)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env={})


def _writing_in(folder: Path) -> Iterator[Process]:
    for entry in _listed(Path("/proc")):
        if not entry.isdigit() or int(entry) in (os.getpid(), os.getppid()):
            continue
        path, process = Path("/proc", entry), Process.of(int(entry))

        with suppress(OSError):
            if path.stat().st_uid != os.getuid() or process.has_ended():
                continue
            if _writes(path / "fd", f"{folder}/"):
                yield process


def _writes(open_files: Path, start: str) -> bool:
    for name in _listed(open_files):
        with suppress(OSError):
            link = open_files / name
            # the mode of the link is that in which the file was opened
            if os.readlink(link).startswith(start) and link.lstat().st_mode & stat.S_IWUSR:
                return True
    return False


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` that follow the name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_all_of(Path(sys.argv[1]), float(sys.argv[2]))
