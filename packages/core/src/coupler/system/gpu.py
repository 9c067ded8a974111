"""Look for a GPU without importing torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

DEADLINE_S = 20


def gpu_is_visible() -> bool:
    """Tell whether this process may use a GPU, as far as the driver's file says."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    return Path("/dev/nvidiactl").exists() and visible not in ("", "-1")


def device_bytes() -> int:
    """Return the memory of the smallest GPU, 0 where the driver's tool says nothing."""
    sizes = [int(line) for line in _asked("memory.total") if line.isdecimal()]
    return min(sizes, default=0) << 20


def device_name() -> str:
    """Return the name of the first GPU, empty where the driver's tool says nothing."""
    return next(iter(_asked("name")), "")


def _asked(field: str) -> list[str]:
    """Return what the driver's tool says of each GPU. It is not there without one."""
    command = ("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
