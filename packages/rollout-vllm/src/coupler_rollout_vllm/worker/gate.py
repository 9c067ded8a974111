"""Let a model worker of vLLM wait before it takes its device.

vLLM imports its own worker first, then looks up the extension of it here, and makes the
worker last.
"""

from __future__ import annotations

import fcntl
import os
from typing import Any

GATE = "COUPLER_VLLM_GATE"
"""Environment variable with the file that the other side holds locked."""
OPEN = b"open"


def wait() -> None:
    """Wait until the gate is open. The process ends if it never will be."""
    path = os.environ.get(GATE)
    if not path:
        return

    try:
        with open(path, "rb") as gate:
            # The side that holds it lets go when it ends, at the latest.
            fcntl.flock(gate, fcntl.LOCK_SH)
            if gate.read() == OPEN:
                return
    except FileNotFoundError:
        os._exit(1)
    os._exit(1)


def __getattr__(name: str) -> Any:
    if name != "WorkerExtension":
        raise AttributeError(name)
    wait()
    from coupler_rollout_vllm.worker.extension import WorkerExtension

    return WorkerExtension
