"""Log-probabilities and entropy of tokens without the ``[R, V]`` logits.

Only a tile ``[R, v]`` of the logits exists at a time; the forward pass keeps a running log-sum-exp over the tiles, the
backward pass computes each tile again. Tiles cut the vocabulary, not the rows: each row of the head's weight is then
read once and its gradient written once. Everything about a logit is fp32.

Shapes: R rows, H hidden size, V vocabulary, v width of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 2**21  # elements


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor | None = None,
    want_entropy: bool = False,
    chunk: int = TILE,
) -> tuple[Tensor, Tensor | None]:
    """Return log p(target) and, if wanted, the entropy of p = softmax((hidden @ weight.T + bias) / temperature).

    Args:
        hidden: [R, H] of the dtype of ``weight``.
        weight: [V, H].
        bias: [V] or None.
        targets: [R] int64 in [0, V).
        temperature: [R] fp32 above 0; None is 1 everywhere.
        want_entropy: also return the entropy; it is differentiable too.
        chunk: elements of the logits that exist at a time; performance only.

    Returns:
        [R] fp32 log-probs and [R] fp32 entropy or None, both in nats.
    """
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, bias, targets, temperature, want_entropy, chunk)
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor | None,
        want_entropy: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor | None]:
        log_z = hidden.new_full((len(hidden),), -torch.inf, dtype=torch.float32)  # log-sum-exp of the tiles so far
        mean = torch.zeros_like(log_z)  # of the logits under softmax over the tiles so far
        picked = torch.zeros_like(log_z)  # logit of the target
        ctx.tiles = list(_tiles(len(weight), len(hidden), chunk))
        for tile in ctx.tiles:
            logits = _logits(hidden, weight, bias, temperature, tile)
            index, inside = _locate(targets, tile)
            picked = torch.where(inside, logits.gather(1, index).squeeze(1), picked)
            tile_log_z = logits.logsumexp(1)
            total = torch.logaddexp(log_z, tile_log_z)
            if want_entropy:
                tile_mean = torch.linalg.vecdot((logits - total[:, None]).exp_(), logits)  # already times its share
                mean = mean * (log_z - total).exp() + tile_mean
            log_z = total
        entropy = log_z - mean if want_entropy else None
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, log_z, entropy)
        ctx.set_materialize_grads(False)
        return picked - log_z, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """With z the scaled logits: dz = g (onehot - p) for log-probs, and -g p (log p + entropy) for the entropy."""
        hidden, weight, bias, targets, temperature, log_z, entropy = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_z)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias) if bias is not None else None
        for tile in ctx.tiles:
            log_p = _logits(hidden, weight, bias, temperature, tile).sub_(log_z[:, None])
            if grad_entropy is None:
                grad = log_p.exp_().mul_(-grad_logprobs[:, None])
            else:
                p = log_p.exp()
                grad = log_p.add_(entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_logprobs[:, None]).mul_(p)
            index, inside = _locate(targets, tile)
            grad.scatter_add_(1, index, torch.where(inside, grad_logprobs, 0.0)[:, None])
            if temperature is not None:
                grad.div_(temperature[:, None])
            if grad_bias is not None:
                grad_bias[tile] = grad.sum(0)
            narrow = grad.to(hidden.dtype)
            grad_hidden.add_(_matmul(narrow, weight[tile]))
            if grad_weight is not None:
                torch.mm(narrow.t(), hidden, out=grad_weight[tile])
        return grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None, None, None


def _tiles(vocabulary: int, rows: int, chunk: int) -> Iterator[slice]:
    """Cut the vocabulary into tiles of near-equal width, ``chunk`` elements at most (but 64 columns at least)."""
    width = max(chunk // max(rows, 1), 64)
    count = -(-vocabulary // width)
    width = -(-vocabulary // count)
    return (slice(start, min(start + width, vocabulary)) for start in range(0, vocabulary, width))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor | None, tile: slice) -> Tensor:
    logits = _matmul(hidden, weight[tile].t())
    if bias is not None:
        logits.add_(bias[tile])
    return logits if temperature is None else logits.div_(temperature[:, None])


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """Multiply into fp32; a GPU does not round products of bf16 to bf16 on the way."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left, right).float()


def _locate(targets: Tensor, tile: slice) -> tuple[Tensor, Tensor]:
    """[R, 1] column of each target within the tile, clamped, and [R] whether it is inside."""
    index = targets - tile.start
    inside = (index >= 0) & (index < tile.stop - tile.start)
    return index.clamp(0, tile.stop - tile.start - 1)[:, None], inside
