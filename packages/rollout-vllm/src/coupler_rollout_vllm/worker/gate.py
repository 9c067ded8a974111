"""Let a model worker of vLLM wait before it takes its device.

vLLM imports its own worker first, then looks up the extension of it here, and makes the
worker last.
"""

from __future__ import annotations

import os
from typing import Any

from coupler.engine_kit.inference.gate import opens

GATE = "COUPLER_VLLM_GATE"
"""Environment variable with the path of the gate."""


def __getattr__(name: str) -> Any:
    if name != "WorkerExtension":
        raise AttributeError(name)
    path = os.environ.get(GATE)
    if path and not opens(path):
        # Nobody needs the engine, and vLLM would explain at length.
        os._exit(1)
    from coupler_rollout_vllm.worker.extension import WorkerExtension

    return WorkerExtension
