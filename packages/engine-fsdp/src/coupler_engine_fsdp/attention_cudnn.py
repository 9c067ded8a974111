"""Attend within each of a few long sequences, by the kernel of cuDNN.

It takes one sequence a call, and is faster there than PyTorch's for packed rows
(benchmarks/attention_kernels.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from coupler_engine_fsdp.attention import Packing

LONG = 4096
"""Tokens of the mean sequence from which a call for each one pays."""
MOST_HEAD_DIM = 128
"""Widest head that the kernel has a backward pass for."""
KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
"""The first that takes the sequence. cuDNN's takes none of one token."""
CUDNN = (
    torch.cuda.is_available()
    and torch.backends.cudnn.is_available()
    and torch.cuda.get_device_capability()[0] >= 9
)


@torch.compiler.disable()  # A compiled one would be for these lengths only.
def by_sequence(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None
) -> Tensor:
    """Attend [1, heads, N, D] x [1, kv heads, N, D] -> [1, N, heads, D].

    It is causal within each piece of ``packing``.
    """
    sizes = [piece.end - piece.begin for piece in packing.pieces]
    outs = []

    with sdpa_kernel(KERNELS, set_priority=True):
        for q, k, v in zip(*(x.split(sizes, 2) for x in (query, key, value)), strict=True):
            out = scaled_dot_product_attention(
                q,
                k,
                v,
                is_causal=True,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            outs.append(out.transpose(1, 2))
    return torch.cat(outs, 1) if len(outs) > 1 else outs[0]
