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


def weight_of(name: str) -> str | None:
    """Return the weight that A or B is for, or None if ``name`` is neither."""
    for end in (A, B):
        if name.startswith(PREFIX) and name.endswith(end):
            return name.removeprefix(PREFIX).removesuffix(end) + ".weight"
    return None


def partner(name: str) -> str:
    """Name B for A, and A for B."""
    return name.removesuffix(A) + B if name.endswith(A) else name.removesuffix(B) + A


def start_of(weight: str, rank: int, columns: int, seed: int) -> np.ndarray:
    """Draw the A [rank, columns] that training starts from: U(-1, 1) / sqrt(columns).

    It depends on the weight's name and the seed alone, so that it is equal in every
    engine and on any number of ranks. B starts from 0.
    """
    drawn = stream(seed, "adapter", weight).uniform(-1, 1, (rank, columns))
    return (drawn / columns**0.5).astype(np.float32)


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
