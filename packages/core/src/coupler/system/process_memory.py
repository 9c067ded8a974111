"""Ask the system for the memory of a process."""

from __future__ import annotations

import os
from pathlib import Path


def resident_bytes(pid: int | str = "self") -> int:
    """Return the resident memory of a process.

    The answer is 0 where there is no such process, or the system has no /proc.
    """
    statm = Path(f"/proc/{pid}/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
