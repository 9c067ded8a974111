"""Say how much device memory a replica of SGLang takes."""

from __future__ import annotations

from coupler.engine_kit.inference.footprint import activation_bytes, footprint, weight_bytes
from coupler.engine_kit.memory_plan import GIB, Asked, Needs
from coupler_rollout_sglang.arguments import CPU_CACHE_GIB
from coupler_rollout_sglang.config import SGLangConfig

CHUNKS = ((20, 2048), (60, 4096), (160, 8192))
"""Tokens that SGLang computes at once on devices of less than so many GiB."""
CHUNK = 16384
"""Tokens on larger devices, and of prompts that are computed in one piece."""
GRAPHS = 100
"""About as many CUDA graphs as SGLang captures, of prompts and of single tokens."""
GRAPH = 8 << 20
"""Bytes that SGLang counts for each, besides its tensors."""


def needs(config: SGLangConfig, asked: Asked) -> Needs:
    """Say what one device of a replica holds.

    SGLang takes weights and cache when it starts. Its graphs keep the tensors of a pass
    while it sleeps. A user's own server is elsewhere.
    """
    if config.server:
        return Needs()
    weights = weight_bytes(asked, config.dtype, config.quantization, config.tensor_parallel)
    cache, budget = int(config.kv_cache_gib * GIB), int(config.gpu_memory_gib * GIB)
    unknown, activations, graphs = list[str](), 0, 0
    if asked.gpu:
        tokens = _chunk(asked.device_bytes) if config.chunked_prefill else CHUNK
        activations = activation_bytes(asked, tokens, config.max_sequences, config.tensor_parallel)
        graphs = 0 if config.enforce_eager else activations + GRAPHS * GRAPH

    if not asked.gpu:
        cache = cache or int(CPU_CACHE_GIB * GIB)
    elif not cache and budget:
        cache = max(budget - weights, 0)
    elif not cache:
        unknown.append(f"its KV cache: with {asked.path}.gpu_memory_gib=0 SGLang chooses")
    return footprint(
        asked,
        weights,
        cache,
        unknown,
        sleeps=config.sleep_mode,
        activations=activations,
        graphs=graphs,
    )


def _chunk(device: int) -> int:
    """Return the tokens of a batch of prompts on a device of so many bytes."""
    fitting = (tokens for gib, tokens in CHUNKS if 0 < device < gib * GIB)
    return next(fitting, CHUNK)
