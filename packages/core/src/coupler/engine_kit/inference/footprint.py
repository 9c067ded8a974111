"""Say what an inference engine in a process of its own holds on one device."""

from __future__ import annotations

from collections.abc import Sequence

from coupler.engine_kit.memory_plan import GIB, Asked, Kind, Needs, Phase, Term
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


def activation_bytes(asked: Asked, tokens: int, sequences: int, devices: int) -> int:
    """Return about what a forward pass takes on one of the devices that split it.

    That is the widest layer of ``tokens`` in two bytes a number, with its input and its
    output, and the logits of ``sequences`` in fp32, three times for their log-softmax
    and for sampling.
    """
    shape = asked.shape.get("text_config") or asked.shape
    hidden, vocabulary = shape.get("hidden_size", 0), shape.get("vocab_size", 0)
    wide = 3 * shape.get("intermediate_size", 4 * hidden) // devices + 4 * hidden
    return 2 * tokens * wide + 3 * 4 * sequences * vocabulary


def footprint(
    asked: Asked,
    weights: int,
    cache: int,
    unknown: Sequence[str],
    *,
    sleeps: bool,
    activations: int = 0,
    graphs: int = 0,
) -> Needs:
    """Return the needs of a replica that takes weights and cache when it starts.

    Args:
        sleeps: whether it can give them back.
        activations: bytes that a forward pass takes beside them.
        graphs: bytes of CUDA graphs, which stay while it sleeps, beyond those of
            ``left_bytes``.
    """
    lower = f"a smaller {asked.path}.gpu_memory_gib or {asked.path}.kv_cache_gib"
    parts = Term("weights", weights), Term("KV cache", cache, lower)
    left = Term("CUDA and its graphs", left_bytes(asked) + graphs)
    held: dict[Kind, tuple[Term, ...]] = {None: (left, *(() if sleeps else parts))}
    if sleeps:
        held |= {Memory.WEIGHTS: parts[:1], Memory.KV_CACHE: parts[1:]}

    uncounted = () if asked.parameters else ("its weights, since no engine counts them",)
    peaks = {Phase.SAMPLING: (Term("activations", activations),)} if activations else {}
    return Needs(held=held, peaks=peaks, unknown=(*uncounted, *unknown))
