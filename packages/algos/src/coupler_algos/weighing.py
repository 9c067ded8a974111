"""Bound the weights of importance sampling, and average them over a batch.

``w = p_recomputed / p_rollout``. The controller imports this module: it needs no torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coupler.batch import Batch
from coupler_algos.config import PolicyConfig
from coupler_algos.kl import MAX_LOG_RATIO
from coupler_algos.shaping import by_trajectory, sampled_tokens
from coupler_algos.slots import Correction, Ratio

MEAN_WEIGHT = "mean_weight"
"""The column [B] float32 of the batch's mean weight, under ``correction_normalize``."""


def bounded(config: PolicyConfig, weight: Any, xp: Any) -> tuple[Any, Any]:
    """Return weights as :class:`~coupler_algos.slots.Correction` says, and where they
    changed.

    Args:
        xp: the module ``numpy`` or ``torch``.
    """
    over = weight > config.correction_cap
    if config.correction is Correction.TRUNCATE:
        return weight.clip(max=config.correction_cap), over

    outside = over | (weight < config.correction_floor)
    return xp.where(outside, 0.0, weight), outside


def weights(config: PolicyConfig, batch: Batch) -> np.ndarray:
    """Return the bounded weights: [T] of tokens, or [N] of trajectories where
    ``correction_ratio`` is of sequences.
    """
    mask = batch["loss_mask"]
    columns = (batch["old_logprobs"], batch["rollout_logprobs"])
    recomputed, rollout = (np.where(mask, c, 0).astype(np.float64) for c in columns)
    log = recomputed - rollout

    if config.correction_ratio is not Ratio.TOKEN:
        log = by_trajectory(batch, log)
        if config.correction_ratio is Ratio.GEOMETRIC:
            log = log / np.maximum(sampled_tokens(batch), 1)
    return bounded(
        config,
        np.exp(log.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)),
        np,
    )[0]


def mean_weight(config: PolicyConfig, batch: Batch) -> float:
    """Return the mean of the bounded weights: over sampled tokens, or over trajectories
    where ``correction_ratio`` is of sequences. It is 1 where all of them are 0.
    """
    counts = batch["loss_mask"]
    if config.correction_ratio is not Ratio.TOKEN:
        counts = sampled_tokens(batch)
    counted = weights(config, batch)[counts > 0]
    return float(counted.mean()) if counted.any() else 1.0
