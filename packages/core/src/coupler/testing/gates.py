"""Look at processes that wait at a :class:`~coupler.engine_kit.inference.gate.Gate`."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path


def waiting_at(gate: str, deadline_s: float = 300.0) -> set[int]:
    """Return the processes that wait at a gate, once there are any.

    Raises:
        TimeoutError: none came within the deadline.
    """
    end = time.monotonic() + deadline_s
    while not (found := _readers(gate)):
        if time.monotonic() > end:
            raise TimeoutError(f"no process came to the gate within {deadline_s:g} s")
        time.sleep(0.1)
    return found


def _readers(path: str) -> set[int]:
    """Return who has a file open for reading alone, as its owner has not."""
    found = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        flags = descriptor.parents[1] / "fdinfo" / descriptor.name
        try:
            if os.readlink(descriptor) == path and flags.read_text().split()[3].endswith("0"):
                found.add(int(descriptor.parts[2]))
        # They come and go.
        except OSError:
            continue
    return found


def await_end(pids: Collection[int], deadline_s: float = 30.0) -> None:
    """Wait until processes are gone, or have ended and nobody asked how.

    Raises:
        TimeoutError: one still runs after the deadline.
    """
    end = time.monotonic() + deadline_s
    for pid in pids:
        line = Path(f"/proc/{pid}/cmdline")
        while line.exists() and line.read_bytes():
            if time.monotonic() > end:
                raise TimeoutError(f"process {pid} runs after {deadline_s:g} s")
            time.sleep(0.1)
