"""Compute checksums of the weights in a model worker, by the checkpoint's names."""

from __future__ import annotations

import torch

from coupler.engine_kit.inference.loading import Plan

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
CHUNK = 1 << 24
"""Elements summed together: 64-bit copies of all of a large tensor would not fit."""


def checksum(tensor: torch.Tensor) -> int:
    """Sum a tensor's bits, each element weighed with an odd number of its own.

    An element that changes or moves changes the sum.
    """
    bits = tensor.detach().contiguous().reshape(-1).view(BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), CHUNK):
        part = bits[start : start + CHUNK].long()
        total += (
            part * torch.arange(2 * start + 1, 2 * (start + len(part)), 2, device=bits.device)
        ).sum()
    return int(total) % 2**62


def of_plan(plan: Plan) -> dict[str, int]:
    """Return the checksum of every tensor that an update brings.

    The tensors are read back from the parameters that they were copied into. A worker
    that holds a part of the model (``tensor_parallel``) has other tensors, and other
    checksums.
    """
    found = {}
    for name, way in plan.items():
        first = way.pieces[0].into
        whole = torch.zeros(
            sum(p.into.numel() for p in way.pieces), dtype=first.dtype, device=first.device
        )

        for piece in way.pieces:
            start, shape, strides = piece.source
            whole.as_strided(shape, strides, start).copy_(piece.into)
        found[name] = checksum(whole)
    return found
