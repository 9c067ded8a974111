"""Look for a GPU without importing torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ASK = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
DEADLINE_S = 20


def gpu_is_visible() -> bool:
    """Tell whether this process may use a GPU, as far as the driver's file says."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    return Path("/dev/nvidiactl").exists() and visible not in ("", "-1")


def device_bytes() -> int:
    """Return the memory of the smallest GPU, as the driver's tool says.

    It is 0 where there is no such tool, or it does not answer.
    """
    try:
        done = subprocess.run(ASK, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
        return min(int(line) for line in done.stdout.split()) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0
