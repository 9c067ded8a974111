"""Say how much device memory a replica of vLLM takes."""

from __future__ import annotations

from coupler.engine_kit.inference.footprint import (
    activation_bytes,
    footprint,
    left_bytes,
    weight_bytes,
)
from coupler.engine_kit.memory_plan import GIB, Asked, Needs
from coupler_rollout_vllm.config import CPU_CACHE_GIB, VLLMConfig

BATCHED = 16384
"""Tokens of a batch on a large GPU where ``rollout.max_batched_tokens`` is 0."""
SHARE = 0.9
"""Share of a device that vLLM takes where ``rollout.gpu_memory_gib`` is 0."""


def needs(config: VLLMConfig, asked: Asked) -> Needs:
    """Say what one device of a replica holds.

    vLLM takes its budget when it starts, and its cache is what weights leave of it.
    """
    weights = weight_bytes(asked, config.dtype, config.quantization, config.tensor_parallel)
    cache, budget = int(config.kv_cache_gib * GIB), int(config.gpu_memory_gib * GIB)
    unknown, activations = list[str](), 0
    if cache and asked.gpu:  # otherwise they are part of what it takes
        tokens = config.max_batched_tokens or BATCHED
        activations = activation_bytes(asked, tokens, config.max_sequences, config.tensor_parallel)

    if not asked.gpu:
        cache = cache or int(CPU_CACHE_GIB * GIB)
    elif not cache:
        budget = budget or int(SHARE * asked.device_bytes)
        cache = max(budget - weights - left_bytes(asked), 0)
        if not budget:
            unknown.append(f"its KV cache: it takes {SHARE:.0%} of a device (--device-gib)")
    return footprint(
        asked, weights, cache, unknown, sleeps=config.sleep_mode, activations=activations
    )
