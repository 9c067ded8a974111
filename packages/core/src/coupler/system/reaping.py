"""Find and end the processes that a process of ours has left."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# A process that was killed may take a moment, and may leave others behind.
KILL_S = 1.0


def adopt_orphans() -> None:
    """Become the parent of what a child leaves behind, also in a session of its own.

    Only Linux can. Elsewhere a process that leaves its group is not found.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Be killed when the parent ends, however it ends. Only Linux can."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def children(pid: int | None = None) -> Iterator[int]:
    """Yield the children of a process, this one if none is given.

    There are none where the system has no /proc.
    """
    wanted = str(pid or os.getpid())
    listed = Path(f"/proc/{wanted}/task/{wanted}/children")
    with suppress(OSError):
        yield from map(int, listed.read_text().split())
        return
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name of a program may hold spaces and brackets.
            fields = status.read_text(errors="replace").rpartition(")")[2].split()
            if len(fields) > 1 and fields[1] == wanted:
                yield int(status.parent.name)


def kill_children(keep: Collection[int] = ()) -> None:
    """Kill every child of this process, with what they leave behind, but ``keep``."""
    deadline = time.monotonic() + KILL_S
    while found := [pid for pid in children() if pid not in keep]:
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if time.monotonic() > deadline:
            return
