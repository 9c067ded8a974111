"""Compute the elementwise part of :mod:`coupler_engine_fsdp.logprobs` in PyTorch.

The arguments are those of a tile:

- ``logits`` [R, v] fp32, which are overwritten.
- ``bias`` [v] or None.
- ``temperature`` [R] or None.
- ``targets`` [R], the column of each target. It is outside [0, v) if the target is in
  another tile.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reduce_tile(
    logits: Tensor,
    bias: Tensor | None,
    temperature: Tensor | None,
    targets: Tensor,
    log_z: Tensor,
    mean: Tensor,
    picked: Tensor,
    doubled: Tensor | None,
    want_mean: bool,
) -> None:
    """Add a tile to the running log-sum-exp and mean [R] (fp64).

    ``doubled`` is the log-sum-exp of twice the logits, or None. The logits of targets
    within the tile are copied to ``picked``.
    """
    logits = _scale(logits, bias, temperature)
    index, inside = _locate(targets, logits.shape[1])
    picked.copy_(torch.where(inside, logits.gather(1, index).squeeze(1), picked))

    tile_log_z = logits.logsumexp(1)
    total = torch.logaddexp(log_z, tile_log_z.double())
    if want_mean:
        tile_mean = torch.linalg.vecdot((logits - tile_log_z[:, None]).exp_(), logits)
        mean.lerp_(tile_mean.double(), (tile_log_z - total).exp())
    if doubled is not None:
        of_tile = logits.mul_(2).logsumexp(1).double()
        doubled.copy_(torch.logaddexp(doubled, of_tile))
    log_z.copy_(total)


def grad_tile(
    logits: Tensor,
    bias: Tensor | None,
    temperature: Tensor | None,
    targets: Tensor,
    log_z: Tensor,
    entropy: Tensor | None,
    squares: Tensor | None,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    grad_squares: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of the unscaled logits [R, v] in ``dtype``.

    With z the scaled logits, dz = g (onehot - p) for log-probs, -g p (log p + entropy)
    for the entropy, and 2 g p (p - s) for the sum s of squares.
    """
    log_p = _scale(logits, bias, temperature).sub_(log_z[:, None])
    if grad_entropy is None and grad_squares is None:
        grad = log_p.exp_().mul_(-grad_logprobs[:, None])
    else:
        p, grad = log_p.exp(), log_p
        if grad_entropy is None or entropy is None:
            grad.zero_()
        else:
            grad.add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        if grad_squares is not None and squares is not None:
            grad.add_((p - squares[:, None]).mul_(2 * grad_squares[:, None]))
        grad.sub_(grad_logprobs[:, None]).mul_(p)
    index, inside = _locate(targets, grad.shape[1])
    grad.scatter_add_(1, index, torch.where(inside, grad_logprobs, 0.0)[:, None])
    if temperature is not None:
        grad.div_(temperature[:, None])
    return grad.to(dtype)


def _scale(logits: Tensor, bias: Tensor | None, temperature: Tensor | None) -> Tensor:
    if bias is not None:
        logits.add_(bias)
    return logits if temperature is None else logits.div_(temperature[:, None])


def _locate(targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the column of each target [R, 1], clamped into the tile, and if it is
    inside.
    """
    return targets.clamp(0, width - 1)[:, None], (targets >= 0) & (targets < width)
