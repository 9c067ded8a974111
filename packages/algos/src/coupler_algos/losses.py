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
from coupler_algos import corrections, kl
from coupler_algos.columns import Tokens, mean
from coupler_algos.config import KL, KLEstimator, PolicyConfig, PPOConfig
from coupler_algos.kl import KL_COEF
from coupler_algos.shapes import outside, ratio_of, surrogate
from coupler_algos.slots import Ratio, Shape
from coupler_algos.weighing import MEAN_WEIGHT


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
    """Return the surrogate of ``config.shape``, corrected and regularised, [T].

    With one ratio per sequence, its product over tokens, a sequence has one surrogate,
    of which each valid token holds an equal part.
    """
    tokens = Tokens.of(config, out, batch)
    ratio = ratio_of(config, tokens)
    loss = surrogate(config, ratio, tokens)
    metrics = _ratio_metrics(config, ratio.detach(), tokens)

    loss, found = _corrected(
        config,
        loss,
        tokens,
        batch,
    )
    metrics |= found
    metrics["policy_loss"] = tokens.mean(loss)
    if config.ratio is Ratio.SEQUENCE and not config.shape.by_token:
        loss = tokens.sequences.count_once(loss)

    loss, found = _held(
        config,
        loss,
        tokens,
        batch,
    )
    metrics |= found
    if "entropy" in out:
        entropy = torch.where(tokens.mask, out["entropy"], 0.0)
        metrics["entropy"] = tokens.mean(entropy)
        if config.entropy_coef:
            loss = loss - config.entropy_coef * entropy
    return loss, metrics


def _corrected(
    config: PolicyConfig, loss: Tensor, tokens: Tokens, batch: Columns
) -> tuple[Tensor, Metrics]:
    """Drop and weigh tokens of a surrogate [T].

    What is dropped still counts where core normalises: a step gets smaller, and its
    other tokens do not get larger.
    """
    metrics: Metrics = {}
    if tokens.marked is not None:
        metrics["covariance_marked"] = tokens.mean(tokens.marked)
        # Clip-Cov: arXiv 2505.22617, section 4.2.
        loss = loss if config.covariance_kl else torch.where(tokens.marked, loss.detach(), loss)
    if tokens.far is not None:
        loss = torch.where(tokens.far, 0.0, loss)
        metrics["second_moment_masked"] = tokens.mean(tokens.far)
    if config.opsm_delta:
        dropped = corrections.dropped_as_unlikely(config, tokens)
        loss = torch.where(dropped, 0.0, loss)
        metrics["opsm_masked"] = tokens.mean(dropped)
    if tokens.rollout is None or not config.measures_mismatch:
        return loss, metrics

    if config.reject:
        rejected = corrections.rejected(config, tokens, tokens.rollout)
        loss = torch.where(rejected, 0.0, loss)
        metrics["rejected"] = tokens.mean(rejected)
    if config.correction_cap:
        weight, measured = corrections.weights(config, tokens, tokens.rollout)
        if MEAN_WEIGHT in batch:
            weight = weight / batch[MEAN_WEIGHT][batch["seq"]]
        loss = loss * weight
        metrics |= measured
    return loss, metrics | corrections.measured(config, tokens, tokens.rollout)


def _held(
    config: PolicyConfig, loss: Tensor, tokens: Tokens, batch: Columns
) -> tuple[Tensor, Metrics]:
    """Add to a loss [T] what holds the policy near the old one and the reference."""
    metrics: Metrics = {}
    moved = tokens.logprobs - tokens.old
    if config.proximal_coef:
        loss = loss + config.proximal_coef * moved * moved
    if config.covariance_kl and tokens.marked is not None:
        # KL-Cov: arXiv 2505.22617, section 4.2.
        loss = loss + torch.where(tokens.marked, config.covariance_kl * moved.abs(), 0.0)

    if config.teacher_coef:
        teacher = torch.where(tokens.mask, batch["teacher_logprobs"], 0.0)
        metrics["kl_teacher"] = tokens.mean(tokens.logprobs - teacher)
    if config.kl is not KL.NONE:
        reference = torch.where(tokens.mask, batch["ref_logprobs"], 0.0)
        logprobs = tokens.logprobs
        divergence = kl.estimate(
            KLEstimator.K3,
            logprobs.detach(),
            reference,
            torch,
        )
        metrics["kl_ref"] = tokens.mean(divergence)
        if config.kl is KL.IN_LOSS:
            coefficient = batch[KL_COEF][batch["seq"]] if KL_COEF in batch else config.kl_coef
            loss = loss + coefficient * kl.estimate(
                config.kl_estimator,
                logprobs,
                reference,
                torch,
            )
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
        metrics["clip_fraction"] = mean(moved & (clipped > loss), mask)
        loss = torch.maximum(loss, clipped)
    return loss, {**metrics, "value_loss": mean(loss, mask)}


def _ratio_metrics(config: PolicyConfig, ratio: Tensor, tokens: Tokens) -> Metrics:
    valid_ratio, advantages = torch.where(tokens.mask, ratio, 0.0), tokens.advantages
    metrics = {
        "ratio_mean": tokens.mean(ratio),
        "ratio_max": Metric(valid_ratio.max() if len(ratio) else ratio.new_zeros(()), how="max"),
        "kl_old": tokens.mean(-ratio.log()),
    }

    # A clip without a gradient holds for both signs of an advantage.
    either = config.shape is Shape.DETACHED_CLIP
    below, above = outside(config, ratio, tokens)
    if config.clip_low:
        metrics["clip_low"] = tokens.mean(below & (either | (advantages < 0)))
    if config.clip_high:
        metrics["clip_high"] = tokens.mean(above & (either | (advantages > 0)))
    if config.dual_clip:
        metrics["clip_dual"] = tokens.mean((ratio > config.dual_clip) & (advantages < 0))
    return metrics
