"""Say how much device memory a replica of SGLang takes."""

from __future__ import annotations

from coupler.engine_kit.inference.footprint import footprint, weight_bytes
from coupler.engine_kit.memory_plan import GIB, Asked, Needs
from coupler_rollout_sglang.arguments import CPU_CACHE_GIB
from coupler_rollout_sglang.config import SGLangConfig


def needs(config: SGLangConfig, asked: Asked) -> Needs:
    """Say what one device of a replica holds.

    SGLang takes weights and cache when it starts. A user's own server is elsewhere.
    """
    if config.server:
        return Needs()
    weights = weight_bytes(asked, config.dtype, config.quantization, config.tensor_parallel)
    cache, budget = int(config.kv_cache_gib * GIB), int(config.gpu_memory_gib * GIB)
    unknown = ["its activations, and its graphs while it is awake"] if asked.gpu else []

    if not asked.gpu:
        cache = cache or int(CPU_CACHE_GIB * GIB)
    elif not cache and budget:
        cache = max(budget - weights, 0)
    elif not cache:
        unknown.append(f"its KV cache: with {asked.path}.gpu_memory_gib=0 SGLang chooses")
    return footprint(asked, weights, cache, unknown, sleeps=config.sleep_mode)
