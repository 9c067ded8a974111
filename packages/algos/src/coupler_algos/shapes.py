"""Turn ratios and advantages into the loss of a token, in torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coupler_algos.config import PolicyConfig, Shape


def surrogate(config: PolicyConfig, ratio: Tensor, advantages: Tensor, logprobs: Tensor) -> Tensor:
    """Return the loss of each token [T] that ``config.shape`` names."""
    low, high = config.clip_low, config.clip_high

    match config.shape:
        case Shape.CLIP:
            return clipped_surrogate(
                ratio,
                advantages,
                low,
                high,
                config.dual_clip,
            )
        case Shape.DETACHED_CLIP:
            return detached_clip(ratio, advantages, logprobs, low, high)
        case Shape.GATE:
            return gate(ratio, advantages, config.gate_positive, config.gate_negative)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float
) -> Tensor:
    """Return ``max(-A * r, -A * clip(r, 1 - low, 1 + high))`` [T].

    It is PPO (arXiv 1707.06347) eq. 7 with the two limits of DAPO (arXiv 2503.14476)
    eq. 10. A limit of 0 is none. If A < 0, ``dual`` bounds the loss by ``-A * dual``:
    dual-clip PPO (arXiv 1912.09729).
    """
    loss = torch.maximum(-advantages * ratio, -advantages * clipped(ratio, low, high))
    if not dual:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual), loss)


def detached_clip(
    ratio: Tensor, advantages: Tensor, logprobs: Tensor, low: float, high: float
) -> Tensor:
    """Return ``-A * clip(r, 1 - low, 1 + high) * log p`` [T], where the clipped ratio
    has no gradient: CISPO (MiniMax-M1, arXiv 2506.13585) eq. 4 and 5.

    A token beyond a limit keeps its gradient, with the limit for its weight.
    """
    return -advantages * clipped(ratio.detach(), low, high) * logprobs


def gate(ratio: Tensor, advantages: Tensor, positive: float, negative: float) -> Tensor:
    """Return ``-A * 4 / tau * sigmoid(tau * (r - 1))`` [T]: SAPO (arXiv 2511.20347).

    The gradient falls smoothly with the distance of r from 1, where it is that of
    ``-A * r``. ``tau`` is ``positive`` where A > 0 and ``negative`` elsewhere.
    """
    tau = torch.where(advantages > 0, positive, negative)
    return -advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1))


def clipped(ratio: Tensor, low: float, high: float) -> Tensor:
    """Return ``clip(r, 1 - low, 1 + high)``, where a limit of 0 is none."""
    return ratio.clamp(1 - (low or math.inf), 1 + (high or math.inf))
