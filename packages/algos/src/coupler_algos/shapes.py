"""Turn ratios and advantages into the loss of a token, in torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coupler_algos.columns import Tokens
from coupler_algos.config import PolicyConfig
from coupler_algos.slots import Shape


def ratio_of(config: PolicyConfig, tokens: Tokens) -> Tensor:
    """Return the ratio of each token [T], at the level of ``config.ratio``."""
    logprobs, old = tokens.logprobs, tokens.old
    if config.shape is Shape.CLIP_TOKENS:
        logprobs = old + clipped_move(
            logprobs - old,
            tokens.advantages,
            config.clip_low,
            config.clip_high,
        )
    return tokens.sequences.log_ratio(logprobs, old, config.ratio).exp()


def surrogate(config: PolicyConfig, ratio: Tensor, tokens: Tokens) -> Tensor:
    """Return the loss of each token [T] that ``config.shape`` names."""
    low, high = config.clip_low, config.clip_high
    advantages, logprobs = tokens.advantages, tokens.logprobs

    match config.shape:
        case Shape.CLIP:
            return clipped_surrogate(
                ratio,
                advantages,
                low,
                high,
                config.dual_clip,
            )
        case Shape.CLIP_TOKENS:
            return -advantages * ratio
        case Shape.DETACHED_CLIP:
            return detached_clip(
                ratio,
                advantages,
                logprobs,
                low,
                high,
            )
        case Shape.GATE:
            return gate(
                ratio,
                advantages,
                config.gate_positive,
                config.gate_negative,
            )
        case Shape.TV_MASK:
            below, above = outside(config, ratio, tokens)
            away = torch.where(advantages > 0, above, below)
            return torch.where(away, 0.0, -advantages * ratio)
        case Shape.TAPER:
            return taper(ratio, advantages, logprobs)
        case Shape.GAMMA_KERNEL:
            return gamma_kernel(
                ratio,
                advantages,
                logprobs,
                (config.kernel_power_positive, config.kernel_rate_positive),
                (config.kernel_power_negative, config.kernel_rate_negative),
            )
        case Shape.LIKELIHOOD:
            return -advantages * logprobs


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


def clipped_move(move: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Clip the log-ratio of each token [T] on the side that its advantage pulls it to.

    It is at most ``log(1 + high)`` where A > 0, and at least ``log(1 - low)``
    elsewhere: GMPO (arXiv 2507.20673). A limit of 0 is none.
    """
    most = math.log1p(high) if high else math.inf
    least = math.log1p(-low) if low else -math.inf
    return torch.where(advantages > 0, move.clamp(max=most), move.clamp(min=least))


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


def taper(ratio: Tensor, advantages: Tensor, logprobs: Tensor) -> Tensor:
    """Return ``-A * log p`` [T] where A > 0, and ``-A * min(r, 1) * log p`` elsewhere,
    where r has no gradient: TOPR (arXiv 2503.14286).

    What the policy no longer does is not pushed down further.
    """
    weight = torch.where(advantages > 0, 1.0, ratio.detach().clamp(max=1))
    return -advantages * weight * logprobs


def gamma_kernel(
    ratio: Tensor,
    advantages: Tensor,
    logprobs: Tensor,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> Tensor:
    """Return ``-A * r^k * exp(lambda * (1 - r)) * log p`` [T], where r has no gradient:
    VESPO (arXiv 2602.10693).

    The weight is 1 at r = 1, has the shape of a Gamma density, and falls to 0 for small
    and for large r. It is the exponential of a sum, because a large power of a large r
    has no float32.

    Args:
        positive: the power k and the rate lambda where A > 0.
        negative: those elsewhere.
    """
    ratio = ratio.detach()
    up, down = (
        torch.exp(power * ratio.log() + rate * (1 - ratio)) for power, rate in (positive, negative)
    )
    return -advantages * torch.where(advantages > 0, up, down) * logprobs


def clipped(ratio: Tensor, low: float, high: float) -> Tensor:
    """Return ``clip(r, 1 - low, 1 + high)``, where a limit of 0 is none."""
    return ratio.clamp(1 - (low or math.inf), 1 + (high or math.inf))


def outside(config: PolicyConfig, ratio: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Return where [T] a token is below ``clip_low``, and where above ``clip_high``.

    They are limits of the difference of probabilities under ``tv_mask``, by DPPO (arXiv
    2602.04879): its total variation between the token and all others. They are limits
    of each token's ratio under ``clip_tokens``, else of the ratio. A limit of 0 is
    none.
    """
    low, high = config.clip_low or math.inf, config.clip_high or math.inf
    logprobs, old = tokens.logprobs.detach(), tokens.old

    match config.shape:
        case Shape.TV_MASK:
            moved = logprobs.exp() - old.exp()
        case Shape.CLIP_TOKENS:
            moved = (logprobs - old).exp() - 1
        case _:
            return ratio < 1 - low, ratio > 1 + high
    return moved < -low, moved > high
