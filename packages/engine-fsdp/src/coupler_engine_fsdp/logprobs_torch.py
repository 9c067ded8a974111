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

from coupler.engine_kit.softmax import locate, logit_slopes


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
    index, inside = locate(targets, logits.shape[1])
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
    """Return the gradient of the unscaled logits [R, v] in ``dtype``."""
    log_p = _scale(logits, bias, temperature).sub_(log_z[:, None])
    of_entropy, of_squares = (grad_entropy, entropy), (grad_squares, squares)
    grad = logit_slopes(log_p, targets, grad_logprobs, of_entropy, of_squares)
    if temperature is not None:
        grad.div_(temperature[:, None])
    return grad.to(dtype)


def _scale(logits: Tensor, bias: Tensor | None, temperature: Tensor | None) -> Tensor:
    if bias is not None:
        logits.add_(bias)
    return logits if temperature is None else logits.div_(temperature[:, None])
