"""Ask the system for the memory of a process."""

from __future__ import annotations

import os
from pathlib import Path


def resident_bytes(pid: int | str = "self") -> int:
    """Return the resident memory of a process.

    The answer is 0 where there is no such process, or the system has no /proc.
    """
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    # It may end while it is read.
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
