"""Allocate many tensors in one storage.

A GPU takes as long to free hundreds of storages as to copy gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNED = 128
"""Tensors start at multiples of so many numbers in their storage."""


def zeros(
    sizes: Sequence[int], dtype: torch.dtype, device: torch.device | None
) -> tuple[Tensor, list[Tensor]]:
    """Return a storage of zeros, and the tensors [size] in it, one for each size."""
    rooms = [-(-size // ALIGNED) * ALIGNED for size in sizes]

    whole = torch.zeros(
        sum(rooms),
        dtype=dtype,
        device=device,
    )
    return whole, [
        room[:size]
        for room, size in zip(
            whole.split(rooms),
            sizes,
            strict=True,
        )
    ]
