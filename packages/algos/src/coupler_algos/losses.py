"""Compute losses per token, in torch.

Engines import this module; the controller never does. Nothing here divides by the
tokens of a batch: core's column ``loss_weight`` does. Values outside ``loss_mask`` are
replaced before any arithmetic, so that neither the loss nor its gradient can depend on
them, NaN included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coupler.interfaces import Columns
from coupler.metrics import Metric, Metrics
from coupler_algos import kl
from coupler_algos.config import (
    KL,
    Behaviour,
    Correction,
    KLEstimator,
    PolicyConfig,
    PPOConfig,
    Ratio,
    Shape,
)
from coupler_algos.kl import KL_COEF
from coupler_algos.ratios import Sequences
from coupler_algos.shapes import surrogate


def nll_loss(out: Columns, batch: Columns) -> tuple[Tensor, Metrics]:
    """Return ``-log p(token)`` [T], in nats."""
    mask = batch["loss_mask"]
    loss = torch.where(mask, -out["logprobs"], 0.0)
    return loss, {"nll": Metric(loss.detach().sum(), mask.sum())}


def policy_loss(
    config: PolicyConfig,
    out: Columns,
    batch: Columns,
) -> tuple[Tensor, Metrics]:
    """Return the surrogate of ``config.shape``, with KL and entropy bonus, [T].

    ``kl_coef * KL`` is added and ``entropy_coef * entropy`` subtracted. With one ratio
    per sequence, its product over tokens, a sequence has one surrogate, of which each
    valid token holds an equal part.
    """
    mask, sequences = batch["loss_mask"], Sequences.of(batch)

    def valid(column: Tensor) -> Tensor:
        return torch.where(mask, column, 0.0)

    logprobs, advantages = valid(out["logprobs"]), valid(batch["advantages"])
    if config.behaviour is Behaviour.ROLLOUT:
        old = valid(batch["rollout_logprobs"])
    else:
        old = valid(batch["old_logprobs"]) if "old_logprobs" in batch else logprobs.detach()

    ratio = sequences.log_ratio(logprobs, old, config.ratio).exp()
    loss = surrogate(
        config,
        ratio,
        advantages,
        logprobs,
    )
    metrics = _ratio_metrics(config, ratio.detach(), advantages, mask)

    if config.opsm_delta:
        moved = sequences.log_ratio(old, logprobs.detach(), Ratio.GEOMETRIC)
        dropped = (advantages < 0) & (moved > config.opsm_delta)
        loss = torch.where(dropped, 0.0, loss)
        metrics["opsm_masked"] = _mean(dropped, mask)
    if config.correction_cap:
        weight, measured = _correction(config, sequences, old, valid(batch["rollout_logprobs"]))
        loss = loss * weight
        metrics |= measured
    metrics["policy_loss"] = _mean(loss, mask)
    if config.ratio is Ratio.SEQUENCE:
        loss = sequences.count_once(loss)

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


def _correction(
    config: PolicyConfig, sequences: Sequences, recomputed: Tensor, rollout: Tensor
) -> tuple[Tensor, Metrics]:
    """Return the weights [T] for tokens that another program sampled.

    ``w = p_recomputed / p_rollout``, as :class:`~coupler_algos.config.Correction` says.
    """
    weight = sequences.log_ratio(
        recomputed,
        rollout,
        config.correction_ratio,
    ).exp()
    over = weight > config.correction_cap
    if config.correction is Correction.TRUNCATE:
        return weight.clamp(max=config.correction_cap), {
            "correction_capped": _mean(over, sequences.mask)
        }

    outside = over | (weight < config.correction_floor)
    return torch.where(outside, 0.0, weight), {"correction_masked": _mean(outside, sequences.mask)}


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


def _ratio_metrics(
    config: PolicyConfig, ratio: Tensor, advantages: Tensor, mask: Tensor
) -> Metrics:
    valid_ratio = torch.where(mask, ratio, 0.0)
    metrics = {
        "ratio_mean": _mean(ratio, mask),
        "ratio_max": Metric(valid_ratio.max() if len(ratio) else ratio.new_zeros(()), how="max"),
        "kl_old": _mean(-ratio.log(), mask),
    }

    # A clip without a gradient holds for both signs of an advantage.
    either = config.shape is Shape.DETACHED_CLIP
    if config.clip_low:
        below = ratio < 1 - config.clip_low
        metrics["clip_low"] = _mean(below & (either | (advantages < 0)), mask)
    if config.clip_high:
        above = ratio > 1 + config.clip_high
        metrics["clip_high"] = _mean(above & (either | (advantages > 0)), mask)
    if config.dual_clip:
        metrics["clip_dual"] = _mean((ratio > config.dual_clip) & (advantages < 0), mask)
    return metrics


def _mean(per_token: Tensor, mask: Tensor) -> Metric:
    return Metric(torch.where(mask, per_token.detach(), 0).sum(), mask.sum())
