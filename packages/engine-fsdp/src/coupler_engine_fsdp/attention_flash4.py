"""flash-attn-4 as an operator that ``torch.compile`` does not look into. Faster than PyTorch's own kernel on Hopper.

Its public function is an autograd function, at which a compiled layer would break in two; what it calls is used here.
"""

# ruff: noqa: ARG001 -- what only knows shapes takes the same arguments as what computes
# pyright: reportMissingImports=false

from __future__ import annotations

import torch
from torch import Tensor

HEAD_DIMS = (64, 96, 128)  # what its kernels are tuned for


@torch.library.custom_op("coupler::flash_4", mutates_args=())
def flash_4(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scaling: float, window: int
) -> tuple[Tensor, Tensor]:
    """Causal attention within sequences: [N, heads, D] x [N, kv heads, D] -> [N, heads, D], log-sum-exp [heads, N].

    Args:
        ends: [B + 1] int32, where sequences begin and end.
        longest: tokens of the longest one.
        window: tokens that a token sees, itself included; 0 is all before it.
    """
    from flash_attn.cute.interface import _flash_attn_fwd

    out, lse = _flash_attn_fwd(
        query,
        key,
        value,
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=scaling,
        causal=True,
        window_size_left=window - 1 if window else None,
        return_lse=True,
    )[:2]
    return out, lse


@flash_4.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scaling: float, window: int):
    lse = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    return torch.empty_like(query, memory_format=torch.contiguous_format), lse


@torch.library.custom_op("coupler::flash_4_backward", mutates_args=())
def flash_4_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    ends: Tensor,
    longest: int,
    scaling: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    from flash_attn.cute.interface import _flash_attn_bwd

    grads = _flash_attn_bwd(
        query,
        key,
        value,
        out,
        grad.contiguous(),
        lse,
        softmax_scale=scaling,
        causal=True,
        window_size_left=window - 1 if window else None,
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
    )
    return grads[0], grads[1], grads[2]


@flash_4_backward.register_fake
def _(grad, query, key, value, out, lse, ends, longest, scaling, window):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))


def _save(ctx, inputs, output) -> None:
    query, key, value, ends, *ctx.numbers = inputs
    ctx.save_for_backward(query, key, value, *output, ends)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad: Tensor, _: Tensor):
    query, key, value, out, lse, ends = ctx.saved_tensors
    return *flash_4_backward(grad, query, key, value, out, lse, ends, *ctx.numbers), None, None, None, None


flash_4.register_autograd(_backward, setup_context=_save)
