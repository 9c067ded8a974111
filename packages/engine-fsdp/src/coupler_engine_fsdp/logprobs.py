"""Compute log-probs, entropy and sums of squares without the ``[R, V]`` logits.

Only a tile ``[R, v]`` of the logits exists at a time. The forward pass keeps a running
log-sum-exp over the tiles, and the backward pass computes each tile again. Tiles cut
the vocabulary, not the rows: each row of the head's weight is then read once and its
gradient written once. Everything about a logit is fp32.

Shapes: R rows, H hidden size, V vocabulary, v width of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coupler.engine_kit.sampling_mask import CUT, cut_off

_ALIGNED = 128
"""Columns. Matrix products of other widths take 2.5 times as long on a GPU."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor | None = None,
    want_entropy: bool = False,
    chunk: int = 0,
    kept: Tensor | None = None,
    want_squares: bool = False,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return log p(target) and, if wanted, entropy, sum of squares of p and log-probs
    of other ids.

    p = softmax((hidden @ weight.T + bias) / temperature), over the ids of ``kept``.

    Args:
        hidden: [R, H] of the dtype of ``weight``.
        weight: [V, H].
        bias: [V] or None.
        targets: [R] int64 in [0, V).
        temperature: [R] fp32 above 0; None is 1 everywhere.
        want_entropy: also return the entropy; it is differentiable too.
        chunk: elements of the logits that exist at a time; performance only. 0 chooses.
        kept: [R, K] int64 ids, the target's among them, and -1 for none. A row of -1
            keeps all, and so does None.
        want_squares: also return ``sum_v p_v^2``, which is differentiable too.
        ids: [R, K] int64 in [0, V), or -1, whose log-prob is ``CUT`` and has no
            gradient.

    Returns:
        [R] fp32 log-probs and [R] fp32 entropy or None, both in nats, [R] fp32 sums of
        squares or None, and [R, K] fp32 differentiable log-probs of ``ids`` or None.
    """
    return _TokenLogprobs.apply(
        hidden, weight, bias, targets, temperature, want_entropy, chunk, kept, want_squares, ids
    )


@torch.no_grad()
def top_ids(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: int,
    chunk: int = 0,
    kept: Tensor | None = None,
) -> Tensor:
    """Return the ids of the k highest logits of each row, [R, k] int64, in order.

    A row ends in -1 where V is less than k. The arguments are those of
    :func:`token_logprobs`. A temperature would change nothing.
    """
    best = hidden.new_full((len(hidden), k), -torch.inf, dtype=torch.float32)
    ids = torch.full_like(best, -1, dtype=torch.int64)

    for tile in _tiles_of(hidden, weight, chunk):
        logits = cut_off(_matmul(hidden, weight[tile].t()), kept, tile.start)
        if bias is not None:
            logits.add_(bias[tile])
        found, place = logits.topk(min(k, logits.shape[1]), 1)
        best, order = torch.cat([best, found], 1).topk(k, 1)
        ids = torch.cat([ids, place + tile.start], 1).gather(1, order)
    return ids


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
        kept: Tensor | None,
        want_squares: bool,
        ids: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        # The log-sum-exp of the tiles so far is fp64: hundreds of tiles add up, and the
        # gradient of the entropy lives on their difference.
        log_z = hidden.new_full((len(hidden),), -torch.inf, dtype=torch.float64)
        # The mean of the logits, under softmax over the tiles so far.
        mean = torch.zeros_like(log_z)
        # The log-sum-exp of twice the logits: sum p^2 = exp(doubled - 2 log_z).
        doubled = torch.full_like(log_z, -torch.inf) if want_squares else None
        # The logit of the target.
        picked = torch.zeros_like(log_z, dtype=torch.float32)
        # Those of other ids, before bias and temperature.
        others = None if ids is None else torch.zeros_like(ids, dtype=torch.float32)

        ctx.tiles = _tiles_of(hidden, weight, chunk)
        reduce_tile = _operations(hidden.is_cuda).reduce_tile
        for tile in ctx.tiles:
            logits = cut_off(_matmul(hidden, weight[tile].t()), kept, tile.start)
            offset = None if bias is None else bias[tile]
            local = targets - tile.start
            if others is not None and ids is not None:
                index, inside = _inside(ids, tile)
                others = torch.where(inside, logits.gather(1, index), others)
            reduce_tile(
                logits, offset, temperature, local, log_z, mean, picked, doubled, want_entropy
            )

        entropy = (log_z - mean).float() if want_entropy else None
        squares = None if doubled is None else (doubled - 2 * log_z).exp().float()
        log_z = log_z.float()
        at_ids = None
        if others is not None and ids is not None:
            at_ids = _finished(others, bias, temperature, ids) - log_z[:, None]
            at_ids.masked_fill_(ids < 0, CUT)
        ctx.save_for_backward(
            hidden,
            weight,
            bias,
            targets,
            temperature,
            kept,
            ids,
            log_z,
            entropy,
            squares,
        )
        ctx.set_materialize_grads(False)
        return picked - log_z, entropy, squares, at_ids

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        grad_squares: Tensor | None,
        grad_at_ids: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, kept, ids, *per_row = ctx.saved_tensors
        log_z, entropy, squares = per_row
        slopes = torch.zeros_like(log_z) if grad_logprobs is None else grad_logprobs.contiguous()
        if grad_entropy is not None:
            grad_entropy = grad_entropy.contiguous()
        if grad_squares is not None:
            grad_squares = grad_squares.contiguous()

        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        # A head under an adapter does not train.
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = None if bias is None else torch.empty_like(bias)
        grad_tile = _operations(hidden.is_cuda).grad_tile
        several, dtype = None, hidden.dtype
        if grad_at_ids is not None:
            # The terms of single ids are added in fp32: they nearly cancel the rest.
            several, slopes = _Several.of(ids, grad_at_ids, targets, slopes, temperature)
            targets, dtype = torch.full_like(targets, -1), torch.float32

        for tile in ctx.tiles:
            logits = cut_off(_matmul(hidden, weight[tile].t()), kept, tile.start)
            offset = None if bias is None else bias[tile]
            local = targets - tile.start if several is None else targets
            grad = grad_tile(
                logits,
                offset,
                temperature,
                local,
                log_z,
                entropy,
                squares,
                slopes,
                grad_entropy,
                grad_squares,
                dtype,
            )
            if several is not None:
                grad = several.add(grad, tile).to(hidden.dtype)
            if grad_bias is not None:
                grad_bias[tile] = grad.sum(0, dtype=torch.float32)
            _add_matmul(grad_hidden, grad, weight[tile])
            if grad_weight is not None:
                torch.mm(grad.t(), hidden, out=grad_weight[tile])
        return grad_hidden.to(hidden.dtype), grad_weight, grad_bias, *(None,) * 7


@dataclass(frozen=True)
class _Several:
    """Gradients of log-probs of several ids a row.

    Attributes:
        ids: [R, 1 + K], the target and other ids.
        slopes: [R, 1 + K] fp32, the derivatives by their unscaled logits, but for the
            part that all logits of a row have.
    """

    ids: Tensor
    slopes: Tensor

    @classmethod
    def of(
        cls,
        ids: Tensor,
        grad_at_ids: Tensor,
        targets: Tensor,
        slopes: Tensor,
        temperature: Tensor | None,
    ) -> tuple[_Several, Tensor]:
        """Join the gradient by the log-probs of ids with ``slopes`` [R] of the targets.

        Returns:
            Them, and their sums [R].
        """
        each = torch.cat([slopes[:, None], grad_at_ids.where(ids >= 0, 0.0)], 1)
        scaled = each if temperature is None else each / temperature[:, None]
        return cls(torch.cat([targets[:, None], ids], 1), scaled), each.sum(1)

    def add(self, grad: Tensor, tile: slice) -> Tensor:
        """Add them to the gradient [R, v] of a tile."""
        index, inside = _inside(self.ids, tile)
        return grad.scatter_add_(1, index, self.slopes.where(inside, 0.0))


def _inside(ids: Tensor, tile: slice) -> tuple[Tensor, Tensor]:
    """Return the columns of ids [R, K] in a tile, clamped, and which ids it has."""
    width = tile.stop - tile.start
    return (ids - tile.start).clamp(0, width - 1), (ids >= tile.start) & (ids < tile.stop)


def _finished(
    logits: Tensor, bias: Tensor | None, temperature: Tensor | None, ids: Tensor
) -> Tensor:
    """Add the bias of ids to their logits [R, K], and divide by the temperature."""
    if bias is not None:
        logits = logits + bias[ids.clamp(min=0)]
    return logits if temperature is None else logits / temperature[:, None]


@cache
def _operations(on_gpu: bool) -> ModuleType:
    """Import the elementwise part: fused kernels on a GPU, else plain PyTorch."""
    fused = on_gpu and find_spec("triton") is not None
    return import_module(f"coupler_engine_fsdp.logprobs_{'triton' if fused else 'torch'}")


def default_chunk(rows: int, on_gpu: bool) -> int:
    """Return how many elements of the logits exist at a time.

    On a GPU it is the least that is not bound by launches and by adding tiles up: 32
    MiB, and 512 MiB from 16,384 rows on.
    """
    return max(2**23, min(rows * rows // 2, 2**27), 1024 * rows) if on_gpu else 2**21


def _tiles_of(hidden: Tensor, weight: Tensor, chunk: int) -> list[slice]:
    """Return the tiles of a head for so many rows. ``chunk`` 0 chooses their size."""
    rows = len(hidden)
    return _tiles(len(weight), rows, chunk or default_chunk(rows, hidden.is_cuda))


def _tiles(vocabulary: int, rows: int, chunk: int) -> list[slice]:
    """Cut the vocabulary into tiles of ``chunk`` elements at most.

    A tile has at least one aligned width.
    """
    width = max(chunk // max(rows, 1) // _ALIGNED, 1) * _ALIGNED
    return [slice(start, min(start + width, vocabulary)) for start in range(0, vocabulary, width)]


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """Multiply into fp32.

    A GPU does not round products of bf16 to bf16 on the way.
    """
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left, right).float()


def _add_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product to ``total``, which is fp32."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.add_(torch.mm(left, right))
