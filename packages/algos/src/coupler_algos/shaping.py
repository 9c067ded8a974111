"""Shape the reward of a trajectory before advantages are computed, in NumPy."""

from __future__ import annotations

import numpy as np

from coupler.batch import Batch
from coupler_algos import kl
from coupler_algos.config import KL, PolicyConfig
from coupler_algos.kl import KL_COEF


def overlong_penalty(num_tokens: np.ndarray, max_tokens: int, buffer_tokens: int) -> np.ndarray:
    """Punish overlong completions softly, by DAPO (arXiv 2503.14476) eq. 13.

    The penalty is 0 up to ``max_tokens - buffer_tokens``. From there it falls linearly
    to -1 at ``max_tokens``, and it is -1 beyond.
    """
    return np.clip((max_tokens - buffer_tokens - num_tokens) / buffer_tokens, -1, 0)


def kl_per_token(config: PolicyConfig, batch: Batch) -> np.ndarray:
    """Estimate the divergence of the policy before the step from the reference.

    Both log-probs are the trainer's, so that equal weights have a divergence of 0.

    Returns:
        [T] float64 in nats; 0 outside ``loss_mask``.
    """
    mask = batch["loss_mask"]
    both = batch["old_logprobs"], batch["ref_logprobs"]
    policy, reference = (np.where(mask, column, 0).astype(np.float64) for column in both)
    return kl.estimate(config.kl_estimator, policy, reference, np)


def kl_coefficient(config: PolicyConfig, batch: Batch) -> np.ndarray:
    """Return [B] the coefficient in force: the controller's if there is one."""
    if batch.has(KL_COEF):
        return batch[KL_COEF].astype(np.float64)
    return np.full(len(batch), config.kl_coef)


def by_trajectory(batch: Batch, per_token: np.ndarray) -> np.ndarray:
    """Sum each trajectory's tokens in float64: [T] -> [N]."""
    first, of_row = batch.trajectories()
    return np.bincount(of_row, batch.sum_by_sequence(per_token), minlength=len(first))


def sampled_tokens(batch: Batch) -> np.ndarray:
    """Return [N] the number of tokens that each trajectory sampled."""
    return by_trajectory(batch, batch["loss_mask"])


def scores(config: PolicyConfig, batch: Batch) -> np.ndarray:
    """Return [N] the reward of each trajectory, with its penalties.

    The order is that of :func:`~coupler_algos.groups.trajectories`.
    """
    first, _ = batch.trajectories()
    score = batch["reward"][first].astype(np.float64)
    if config.overlong_buffer_tokens:
        limit, buffer = config.overlong_max_tokens, config.overlong_buffer_tokens
        score = score + overlong_penalty(sampled_tokens(batch), limit, buffer)
    if config.kl is KL.IN_REWARD:
        coefficient = batch.spread(kl_coefficient(config, batch))
        score = score - by_trajectory(batch, coefficient * kl_per_token(config, batch))

    return score
