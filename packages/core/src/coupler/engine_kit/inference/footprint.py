"""Say what an inference engine in a process of its own holds on one device."""

from __future__ import annotations

from collections.abc import Sequence

from coupler.engine_kit.memory_plan import GIB, Asked, Kind, Needs, Term
from coupler.interfaces import Memory

ASLEEP = int(0.8 * GIB)
"""Bytes of CUDA and its graphs that stay while an engine sleeps. They were measured
(docs/measurements.md)."""
WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4}


def weight_bytes(asked: Asked, dtype: str, quantization: str, devices: int) -> int:
    """Return the bytes of the weights on one of the devices that split them.

    Args:
        dtype: one of bf16, fp16, fp32 and auto, which is bf16 on a GPU and else fp32.
        quantization: not empty where a number takes one byte.
    """
    width = 1 if quantization else WIDTHS.get(dtype, 2 if asked.gpu else 4)
    return width * asked.parameters // devices


def left_bytes(asked: Asked) -> int:
    """Return the bytes that stay on a device while the engine sleeps."""
    return ASLEEP if asked.gpu else 0


def footprint(
    asked: Asked, weights: int, cache: int, unknown: Sequence[str], *, sleeps: bool
) -> Needs:
    """Return the needs of a replica that takes weights and cache when it starts.

    Args:
        sleeps: whether it can give them back.
    """
    lower = f"a smaller {asked.path}.gpu_memory_gib or {asked.path}.kv_cache_gib"
    parts = Term("weights", weights), Term("KV cache", cache, lower)
    left = Term("CUDA and its graphs", left_bytes(asked))
    held: dict[Kind, tuple[Term, ...]] = {None: (left, *(() if sleeps else parts))}
    if sleeps:
        held |= {Memory.WEIGHTS: parts[:1], Memory.KV_CACHE: parts[1:]}

    uncounted = () if asked.parameters else ("its weights, since no engine counts them",)
    return Needs(held=held, unknown=(*uncounted, *unknown))
