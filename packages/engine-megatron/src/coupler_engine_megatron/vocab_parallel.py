"""Compute log-probs, entropy and sums of squares over a vocabulary that ranks share.

The whole logits never exist. Each rank has the rows of the head's weight for its part
of the vocabulary, and computes its logits in tiles of it. Of every tile only
log-sum-exps, the mean logit and the targets' logits remain, and these are combined over
ranks. The backward pass computes each tile again. Everything about a logit is fp32, and
gradients add up in fp32.

Shapes: R rows, H hidden size, V vocabulary, v this rank's part of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from coupler.engine_kit.sampling_mask import cut_off
from coupler.engine_kit.softmax import locate, logit_slopes

_ALIGNED = 128
"""Columns. Matrix products of other widths are slower on a GPU."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    first: int,
    group: dist.ProcessGroup,
    temperature: Tensor | None = None,
    want_entropy: bool = False,
    want_squares: bool = False,
    tile: int = 0,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return log p(target) and, if wanted, entropy and sum of squares of p.

    p = softmax(hidden @ weight.T / temperature), over the ids of ``kept``. The call is
    collective over ``group``, whose ranks get the same results. The gradient of
    ``hidden`` is this rank's share, and their sum is the whole one: Megatron's mapping
    before the head adds them up.

    Args:
        hidden: [R, H], the same on every rank.
        weight: [v, H] of this rank.
        targets: [R] int64 in [0, V).
        first: the token that row 0 of ``weight`` stands for.
        temperature: [R] fp32 above 0; None is 1 everywhere.
        want_entropy: also return the entropy, which is differentiable too.
        want_squares: also return ``sum_v p_v^2``, which is differentiable too.
        tile: elements of the logits that exist at a time; performance only. 0 chooses.
        kept: [R, K] int64 ids, the target's among them, and -1 for none. A row of -1
            keeps all, and so does None.

    Returns:
        [R] fp32 log-probs, [R] fp32 entropy or None, both in nats, and [R] fp32 sums of
        squares or None.
    """
    return _TokenLogprobs.apply(
        hidden, weight, targets, first, group, temperature, want_entropy, want_squares, tile, kept
    )


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        first: int,
        group: dist.ProcessGroup,
        temperature: Tensor | None,
        want_entropy: bool,
        want_squares: bool,
        tile: int,
        kept: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        targets, ctx.first = targets - first, first
        ctx.tiles = _tiles(len(weight), len(hidden), tile or default_tile(hidden.is_cuda))
        picked = hidden.new_zeros(len(hidden), dtype=torch.float32)
        sums, means, doubles = [], [], []
        for part in ctx.tiles:
            logits = cut_off(_logits(hidden, weight[part], temperature), kept, first + part.start)
            index, inside = locate(targets - part.start, logits.shape[1])
            picked += torch.where(inside, logits.gather(1, index).squeeze(1), 0.0)
            log_z = logits.logsumexp(1)
            sums.append(log_z.double())
            if want_entropy:
                p = logits.sub(log_z[:, None]).exp_()
                means.append(torch.linalg.vecdot(p, logits).double())
            if want_squares:
                doubles.append(logits.mul_(2).logsumexp(1).double())

        log_z, mean, picked = _combine(sums, means, picked, group)
        entropy = (log_z - mean).float() if want_entropy else None
        squares = None
        if want_squares:
            doubled = _combine(doubles, [], picked, group)[0]
            squares = (doubled - 2 * log_z).exp().float()

        log_z = log_z.float()
        ctx.save_for_backward(hidden, weight, targets, temperature, kept, log_z, entropy, squares)
        ctx.set_materialize_grads(False)
        return picked - log_z, entropy, squares

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        grad_squares: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperature, kept, log_z, entropy, squares = ctx.saved_tensors
        slopes = torch.zeros_like(log_z) if grad_logprobs is None else grad_logprobs
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        # A head under an adapter does not train.
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None

        for part in ctx.tiles:
            start = ctx.first + part.start
            logits = cut_off(_logits(hidden, weight[part], temperature), kept, start)
            log_p = logits.sub_(log_z[:, None])
            local = targets - part.start
            entropies, sums = (grad_entropy, entropy), (grad_squares, squares)
            grad = logit_slopes(log_p, local, slopes, entropies, sums)
            if temperature is not None:
                grad.div_(temperature[:, None])
            grad = grad.to(hidden.dtype)
            _add_matmul(grad_hidden, grad, weight[part])
            if grad_weight is not None:
                torch.mm(grad.t(), hidden, out=grad_weight[part])
        return grad_hidden.to(hidden.dtype), grad_weight, *(None,) * 8


def _combine(
    sums: list[Tensor], means: list[Tensor], picked: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Combine all tiles of all ranks.

    Returns:
        Log-sum-exp and mean logit in fp64, and the targets' logits.
    """
    each = torch.stack(sums)  # [tiles, R]
    top = each.amax(0)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)

    weights = (each - top).exp()
    mean = (weights * torch.stack(means)).sum(0) if means else torch.zeros_like(top)
    total = torch.stack([weights.sum(0), mean, picked.double()])
    dist.all_reduce(total, group=group)
    return top + total[0].log(), total[1] / total[0], total[2].float()


def _logits(hidden: Tensor, weight: Tensor, temperature: Tensor | None) -> Tensor:
    """Return scaled logits [R, tile] in fp32.

    A GPU does not round products of bf16 to bf16 on the way.
    """
    if hidden.is_cuda and hidden.dtype != torch.float32:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = torch.mm(hidden, weight.t()).float()
    return logits if temperature is None else logits.div_(temperature[:, None])


def _add_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product to ``total``, which is fp32."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.add_(torch.mm(left, right))


def default_tile(on_gpu: bool) -> int:
    """Return a tile's elements. On a GPU launches are too few to bound the time."""
    return 2**26 if on_gpu else 2**21


def _tiles(vocabulary: int, rows: int, elements: int) -> list[slice]:
    """Cut the vocabulary into tiles of so many elements at most.

    A tile has at least one aligned width.
    """
    width = max(elements // max(rows, 1) // _ALIGNED, 1) * _ALIGNED
    return [slice(start, min(start + width, vocabulary)) for start in range(0, vocabulary, width)]
