"""Causal attention over packed sequences: no padding, no N x N mask, no token sees another sequence.

N tokens of B sequences stand in one row; each kernel gets where the sequences begin.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from coupler.errors import CouplerError
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "coupler_varlen"  # transformers builds no mask for a name that it does not know
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # arguments that change what attention computes


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the sequences of a packed row are; travels to every layer as the keyword ``packing``."""

    lengths: tuple[int, ...]  # host copy: sizes of what is launched must not wait for the device
    cu_seqlens: Tensor  # [B + 1] int32 on the device


def register() -> None:
    """Make ``attn_implementation="coupler_varlen"`` known to transformers."""
    AttentionInterface.register(NAME, packed_attention)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """[1, heads, N, D] x [1, kv heads, N, D] -> [1, N, heads, D], as transformers calls it.

    There is no dropout, whatever the model's configuration says: a log-prob is one of the distribution that is sampled.

    Raises:
        CouplerError: the model attends in a way that is not computed here.
    """
    odd = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if packing is None or attention_mask is not None or odd or not getattr(module, "is_causal", True):
        what = f"uses {', '.join(odd)}" if odd else "is not causal self-attention over the packed row"
        raise CouplerError(f"engine=fsdp cannot run this model: the attention of {type(module).__name__} {what}.")
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        out = _fused(query, key, value, packing, scaling, sliding_window)
    else:
        out = _by_sequence(query, key, value, packing, scaling, sliding_window)
    return out, None


def _fused(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, heads, D]
    ends, longest = packing.cu_seqlens, max(packing.lengths)
    reach = (-1 if window is None else window - 1, 0)  # a window of w tokens holds the token itself
    if _has_flash_attn():
        from flash_attn import flash_attn_varlen_func

        out = flash_attn_varlen_func(
            query, key, value, ends, ends, longest, longest, softmax_scale=scaling, causal=True, window_size=reach
        )
    else:
        from torch.nn.attention.varlen import varlen_attn

        gqa = query.shape[1] != key.shape[1]
        out = varlen_attn(
            query, key, value, ends, ends, longest, longest, scale=scaling, window_size=reach, enable_gqa=gqa
        )
    return out[None]


@cache
def _has_flash_attn() -> bool:
    return find_spec("flash_attn") is not None


def _by_sequence(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    """One call per sequence: on a CPU 2 to 6 times as fast as padding to the longest, and no kernel for fp32 exists."""
    gqa = query.shape[1] != key.shape[1]
    lengths = list(packing.lengths)
    outs = []
    for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True):
        n = q.shape[2]
        band = None
        if window is not None and n > window:
            band = torch.ones(n, n, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        out = scaled_dot_product_attention(q, k, v, band, is_causal=band is None, scale=scaling, enable_gqa=gqa)
        outs.append(out.transpose(1, 2))
    return torch.cat(outs, 1)
