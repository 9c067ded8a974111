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
GRAPH = 3 << 20
"""Bytes of each besides its tensors. They were measured (docs/measurements.md)."""


def needs(config: SGLangConfig, asked: Asked) -> Needs:
    """Say what one device of a replica holds.

    SGLang takes weights and cache when it starts. Its graphs compute chunks of prompts
    too, and keep their tensors while it sleeps. A user's own server is elsewhere.
    """
    if config.server:
        return Needs()
    weights = weight_bytes(asked, config.dtype, config.quantization, config.tensor_parallel)
    cache, budget = int(config.kv_cache_gib * GIB), int(config.gpu_memory_gib * GIB)
    unknown, activations, graphs = list[str](), 0, 0
    if asked.gpu:
        tokens = _chunk(asked.device_bytes) if config.chunked_prefill else CHUNK
        captured = tokens if config.chunked_prefill and not config.enforce_eager else 0
        batch = config.max_sequences, config.tensor_parallel
        activations = activation_bytes(asked, tokens - captured, *batch)
        if not config.enforce_eager:
            graphs = activation_bytes(asked, captured, *batch) + GRAPHS * GRAPH

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
