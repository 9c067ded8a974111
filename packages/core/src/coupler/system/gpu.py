"""Look for a GPU without importing torch."""

from __future__ import annotations

import os
from pathlib import Path


def gpu_is_visible() -> bool:
    """Whether this process may use a GPU, as far as the driver's device file says."""
    return Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1")
