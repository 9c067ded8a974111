"""Look for a GPU without importing torch."""

from __future__ import annotations

import os
from pathlib import Path


def gpu_is_visible() -> bool:
    """Tell whether this process may use a GPU, as far as the driver's file says."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    return Path("/dev/nvidiactl").exists() and visible not in ("", "-1")
