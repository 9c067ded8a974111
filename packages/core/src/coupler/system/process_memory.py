"""Ask the system for memory: of a process, of the machine, and what is free of it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

GIB = 1 << 30
GROUPS = Path("/sys/fs/cgroup")
LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
# A container's limit, its use, and the field of its cached files, which make room.
GROUP = ("memory.max", "memory.current", "memory.stat")


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


def machine_bytes() -> int:
    """Return the memory that this machine or container has."""
    bounds = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in LIMITS:
        with contextlib.suppress(OSError, ValueError):
            bounds.append(int((GROUPS / name).read_text()))
    return min(bounds)


def free_bytes() -> int:
    """Return the memory that a process can still get from this machine or container."""
    bounds = [machine_bytes()]
    with contextlib.suppress(OSError, KeyError):
        bounds.append(_fields(Path("/proc/meminfo"))["MemAvailable:"] << 10)

    with contextlib.suppress(OSError, KeyError, ValueError):
        most, used, stat = (GROUPS / name for name in GROUP)
        cached = _fields(stat)["inactive_file"]
        bounds.append(int(most.read_text()) - int(used.read_text()) + cached)
    return max(min(bounds), 0)


def host_shortage(size: int) -> str:
    """Say that the host has less free than ``size`` bytes for what leaves a device.

    The answer is "" where it has them.
    """
    free = free_bytes()
    if size <= free:
        return ""
    return (
        f"{size / GIB:.1f} GiB of host memory are needed for what leaves a device, and "
        f"{free / GIB:.1f} GiB are free.\n"
        "  try:  offload=false, a machine with more memory, or fewer ranks on this one"
    )


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number on each line."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1}
