"""Turn the losses of tokens into the one number that is differentiated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coupler.errors import CouplerError
from coupler.interfaces import Columns, Loss
from coupler.metrics import Metrics

if TYPE_CHECKING:
    from torch import Tensor


def weighted_loss(loss: Loss, outputs: Columns, batch: Columns) -> tuple[Tensor, Metrics]:
    """Sum ``loss`` over the tokens of a micro-batch, each by its ``loss_weight``.

    Neither a gradient nor a NaN of a token with weight 0 gets into the sum.

    Raises:
        CouplerError: the loss is not one differentiable number per token.
    """
    import torch

    token_loss, metrics = loss(outputs, batch)
    weight = batch["loss_weight"]
    if token_loss.shape != weight.shape or not token_loss.requires_grad:
        raise CouplerError(
            f"the loss has shape {list(token_loss.shape)}, expected one differentiable loss "
            f"per token, {list(weight.shape)}.\n"
            "  return losses that are not summed or averaged: loss_weight normalises them"
        )
    return (torch.where(weight != 0, token_loss, 0.0) * weight).sum(), metrics
