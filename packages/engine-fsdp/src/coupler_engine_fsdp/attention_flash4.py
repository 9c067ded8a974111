"""Wrap flash-attn-4 as an operator that ``torch.compile`` does not look into.

It is faster than PyTorch's own kernel on Hopper. Its public function is an autograd
function, at which a compiled layer would break in two. The functions below it are used
here.
"""

# ruff: noqa: ARG001 -- Functions that only know shapes take the arguments of those that
# compute.
# pyright: reportMissingImports=false

from __future__ import annotations

import torch
from torch import Tensor

HEAD_DIMS = (64, 96, 128)
"""The sizes of a head that its kernels are tuned for."""


@torch.library.custom_op("coupler::flash_4", mutates_args=())
def flash_4(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    longest_query: int,
    longest_key: int,
    scaling: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention within pieces.

    [N, heads, D] x [K, kv heads, D] -> [N, heads, D] and log-sum-exp [heads, N]. A
    piece's last query sees all of its keys, the one before it all but the last, and so
    on.

    Args:
        cu_queries: [P + 1] int32, where the queries of each piece begin.
        cu_keys: [P + 1] int32, where its keys begin.
        longest_query: queries of the longest piece.
        longest_key: keys of the longest one.
        window: tokens that a token sees, itself included; 0 is all before it.
    """
    from flash_attn.cute.interface import _flash_attn_fwd

    out, lse = _flash_attn_fwd(
        query,
        key,
        value,
        cu_seqlens_q=cu_queries,
        cu_seqlens_k=cu_keys,
        max_seqlen_q=longest_query,
        max_seqlen_k=longest_key,
        softmax_scale=scaling,
        causal=True,
        window_size_left=window - 1 if window else None,
        return_lse=True,
    )[:2]
    return out.contiguous(), lse.contiguous()


@flash_4.register_fake
def _(query, key, value, cu_queries, cu_keys, longest_query, longest_key, scaling, window):
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
    cu_queries: Tensor,
    cu_keys: Tensor,
    longest_query: int,
    longest_key: int,
    scaling: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, always contiguous.

    The kernel gives a gradient the strides of its tensor. Keys that are gathered for
    shared prompts are not contiguous, and a compiled layer was promised contiguous
    gradients.
    """
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
        cu_seqlens_q=cu_queries,
        cu_seqlens_k=cu_keys,
        max_seqlen_q=longest_query,
        max_seqlen_k=longest_key,
    )
    return grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous()


@flash_4_backward.register_fake
def _(
    grad,
    query,
    key,
    value,
    out,
    lse,
    cu_queries,
    cu_keys,
    longest_query,
    longest_key,
    scaling,
    window,
):
    return tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    )


def _save(ctx, inputs, output) -> None:
    query, key, value, cu_queries, cu_keys, *ctx.numbers = inputs
    ctx.save_for_backward(query, key, value, *output, cu_queries, cu_keys)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad: Tensor, _: Tensor):
    grads = flash_4_backward(grad, *ctx.saved_tensors, *ctx.numbers)
    return *grads, None, None, None, None, None, None


flash_4.register_autograd(_backward, setup_context=_save)
