"""Give back a model worker's device memory and take it again, by part.

Addresses stay the same, so that CUDA graphs stay valid.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch

from coupler.interfaces import Memory
from coupler_rollout_vllm.compat import memory as vllm
from coupler_rollout_vllm.compat.worker import model_of

_saved: dict[str, torch.Tensor] = {}
"""Buffers of the model, which no update brings."""


def sleep(worker: Any, parts: Iterable[Memory]) -> int:
    """Discard what these parts hold, and return how many bytes the device got back.

    On the CPU it does nothing.
    """
    if not vllm.sleeps(worker):
        return 0

    freed = 0
    for part in parts:
        if part is Memory.WEIGHTS:
            _saved.update({name: buffer.cpu() for name, buffer in model_of(worker).named_buffers()})
        freed += vllm.discard(part)

    vllm.forget_scratch()
    gc.collect()
    torch.cuda.empty_cache()
    return freed


def wake(worker: Any, parts: Iterable[Memory]) -> int:
    """Map the memory again, and return how many bytes the device gave.

    Weights and cache are undefined then.
    """
    if not vllm.sleeps(worker):
        return 0

    taken = 0
    for part in parts:
        taken += vllm.restore(part)
        if part is Memory.KV_CACHE:
            vllm.rebuild_beside_cache(worker)
        else:
            for name, buffer in model_of(worker).named_buffers():
                buffer.copy_(_saved[name])
            _saved.clear()
    return taken
