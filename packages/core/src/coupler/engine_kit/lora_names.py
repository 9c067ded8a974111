"""Name the tensors of an adapter (weight format ``lora``), and draw ones that cannot be
mistaken for others.

A weight ``W`` [out, in] that is adapted becomes ``W + B A`` (arXiv 2106.09685), with A
[rank, in] and B [out, rank] that holds the scale already. Both travel under the names
that PEFT gives them in a file.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coupler.system.seeding import stream

PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"


def names_of(weight: str) -> tuple[str, str]:
    """Name A and B of a weight, by its name in the checkpoint."""
    stem = PREFIX + weight.removesuffix(".weight")
    return stem + A, stem + B


def partner(name: str) -> str:
    """Name B for A, and A for B."""
    return name.removesuffix(A) + B if name.endswith(A) else name.removesuffix(B) + A


def random_like(name: str, tensor: Any) -> Any:
    """Draw U(-1, 1) / sqrt(columns) in the shape of an adapter's tensor, by its name
    alone: equal on every rank.

    B is 0 before the first step, and an adapter that nobody runs would look right. With
    these, ``B A x`` is a third as large as x, whatever the rank.
    """
    drawn = stream(0, "adapter", name).uniform(-1, 1, tuple(tensor.shape)) / tensor.shape[-1] ** 0.5
    return (
        drawn.astype(tensor.dtype) if isinstance(tensor, np.ndarray) else tensor.new_tensor(drawn)
    )
