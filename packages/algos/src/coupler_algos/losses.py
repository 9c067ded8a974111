"""Compute losses per token, in torch.

Engines import this module; the controller never does. Nothing here divides by the
tokens of a batch: core's column ``loss_weight`` does. Values outside ``loss_mask`` are
replaced before any arithmetic, so that neither the loss nor its gradient can depend on
them, NaN included.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coupler.interfaces import Columns
from coupler.metrics import Metric, Metrics
from coupler_algos import kl
from coupler_algos.config import KL, Behaviour, KLEstimator, PolicyConfig, PPOConfig
from coupler_algos.kl import KL_COEF, MAX_LOG_RATIO


def nll_loss(out: Columns, batch: Columns) -> tuple[Tensor, Metrics]:
    """Return ``-log p(token)`` [T], in nats."""
    mask = batch["loss_mask"]
    loss = torch.where(mask, -out["logprobs"], 0.0)
    return loss, {"nll": Metric(loss.detach().sum(), mask.sum())}


def policy_loss(
    config: PolicyConfig, out: Columns, batch: Columns, sequence_ratio: bool
) -> tuple[Tensor, Metrics]:
    """Return the clipped surrogate, with KL and entropy bonus, per token [T].

    ``kl_coef * KL`` is added and ``entropy_coef * entropy`` subtracted. The log of the
    ratio is limited to +-20, and its gradient is zero beyond. With ``correction_cap``
    the surrogate is weighted by ``min(p_recomputed / p_rollout, cap)``: the decoupled
    objective of arXiv 2110.00641 with the truncated weights of arXiv 1802.01561.

    Args:
        sequence_ratio: take one ratio per sequence, the product over its tokens. A
            sequence then has one surrogate, of which each valid token holds an equal
            part.
    """
    mask = batch["loss_mask"]

    def valid(column: Tensor) -> Tensor:
        return torch.where(mask, column, 0.0)

    def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
        difference = numerator - denominator
        if sequence_ratio:
            difference = sum_over_sequence(difference, batch["cu_seqlens"], batch["seq"])
        return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    logprobs, advantages = valid(out["logprobs"]), valid(batch["advantages"])
    if config.behaviour is Behaviour.ROLLOUT:
        old = valid(batch["rollout_logprobs"])
    else:
        old = valid(batch["old_logprobs"]) if "old_logprobs" in batch else logprobs.detach()

    ratio = log_ratio(logprobs, old).exp()
    loss = clipped_surrogate(ratio, advantages, config.clip_low, config.clip_high, config.dual_clip)
    metrics = _ratio_metrics(config, ratio.detach(), advantages, mask)
    if config.correction_cap:
        weight = log_ratio(old, valid(batch["rollout_logprobs"])).exp()
        loss = loss * weight.clamp(max=config.correction_cap)
        metrics["correction_capped"] = _mean(weight > config.correction_cap, mask)
    metrics["policy_loss"] = _mean(loss, mask)
    if sequence_ratio:
        loss = count_once(loss, mask, batch["cu_seqlens"], batch["seq"])

    if config.kl is not KL.NONE:
        reference = valid(batch["ref_logprobs"])
        divergence = kl.estimate(KLEstimator.K3, logprobs.detach(), reference, torch)
        metrics["kl_ref"] = _mean(divergence, mask)
        if config.kl is KL.IN_LOSS:
            coefficient = batch[KL_COEF][batch["seq"]] if KL_COEF in batch else config.kl_coef
            loss = loss + coefficient * kl.estimate(config.kl_estimator, logprobs, reference, torch)
    if "entropy" in out:
        entropy = valid(out["entropy"])
        metrics["entropy"] = _mean(entropy, mask)
        if config.entropy_coef:
            loss = loss - config.entropy_coef * entropy
    return loss, metrics


def value_loss(config: PPOConfig, out: Columns, batch: Columns) -> tuple[Tensor, Metrics]:
    """Return the squared error of values against returns [T], halved and clipped.

    It is ``max((v - G)^2, (clip(v, old - c, old + c) - G)^2) / 2`` with returns G, and
    its first part without a limit c: PPO (arXiv 1707.06347) eq. 9, clipped as in the
    code that was published with it.
    """
    mask = batch["loss_mask"]
    values, old, returns = (
        torch.where(mask, c, 0.0) for c in (out["values"], batch["values"], batch["returns"])
    )

    loss = (values - returns) ** 2 / 2
    metrics = {}
    if config.value_clip:
        near = old + (values - old).clamp(-config.value_clip, config.value_clip)
        clipped = (near - returns) ** 2 / 2
        # Without this, rounding of near would count.
        moved = (values - old).abs() > config.value_clip
        metrics["clip_fraction"] = _mean(moved & (clipped > loss), mask)
        loss = torch.maximum(loss, clipped)
    return loss, {**metrics, "value_loss": _mean(loss, mask)}


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float
) -> Tensor:
    """Return ``max(-A * r, -A * clip(r, 1 - low, 1 + high))`` [T].

    It is PPO (arXiv 1707.06347) eq. 7 with the two limits of DAPO (arXiv 2503.14476)
    eq. 10. A limit of 0 is none. If A < 0, ``dual`` bounds the loss by ``-A * dual``:
    dual-clip PPO (arXiv 1912.09729).
    """
    clipped = ratio.clamp(1 - (low or math.inf), 1 + (high or math.inf))
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if not dual:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual), loss)


def sum_over_sequence(per_token: Tensor, cu_seqlens: Tensor, seq: Tensor) -> Tensor:
    """Give every token the sum over its sequence, with its own gradient only.

    Summed over a sequence, the gradients are then those of one loss per sequence: GSPO
    (arXiv 2507.18071) section 4.3.

    Returns:
        [T] as ``per_token``.
    """
    total = torch.segment_reduce(per_token.detach(), "sum", offsets=cu_seqlens.long())
    return total[seq] + (per_token - per_token.detach())


def count_once(per_token: Tensor, mask: Tensor, cu_seqlens: Tensor, seq: Tensor) -> Tensor:
    """Divide a loss that all tokens of a sequence repeat among its valid tokens.

    Their sum is then one loss per sequence, as it is for the gradients, which
    :func:`sum_over_sequence` divided already: they pass as they are.

    Returns:
        [T] as ``per_token``.
    """
    valid = torch.segment_reduce(mask.to(per_token.dtype), "sum", offsets=cu_seqlens.long())
    value = per_token.detach()
    return value / valid.clamp(min=1)[seq] + (per_token - value)


def _ratio_metrics(
    config: PolicyConfig, ratio: Tensor, advantages: Tensor, mask: Tensor
) -> Metrics:
    valid_ratio = torch.where(mask, ratio, 0.0)
    metrics = {
        "ratio_mean": _mean(ratio, mask),
        "ratio_max": Metric(valid_ratio.max() if len(ratio) else ratio.new_zeros(()), how="max"),
        "kl_old": _mean(-ratio.log(), mask),
    }

    if config.clip_low:
        metrics["clip_low"] = _mean((ratio < 1 - config.clip_low) & (advantages < 0), mask)
    if config.clip_high:
        metrics["clip_high"] = _mean((ratio > 1 + config.clip_high) & (advantages > 0), mask)
    if config.dual_clip:
        metrics["clip_dual"] = _mean((ratio > config.dual_clip) & (advantages < 0), mask)
    return metrics


def _mean(per_token: Tensor, mask: Tensor) -> Metric:
    return Metric(torch.where(mask, per_token.detach(), 0).sum(), mask.sum())
