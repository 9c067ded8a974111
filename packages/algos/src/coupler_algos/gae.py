"""Estimate advantages with GAE (arXiv 1506.02438) over packed sequences, in NumPy."""

from __future__ import annotations

import numpy as np

from coupler.batch import Batch


def estimate(
    batch: Batch, rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float
) -> np.ndarray:
    """Estimate advantages by eq. 16, with ``delta`` of eq. 10.

    ``delta_t = r_t + gamma V_t' - V_t`` and ``A_t = delta_t + gamma lam A_t'``, where
    t' is the next token of the sequence under ``loss_mask``. A token that the policy
    did not sample is no step. After the last token V and A are 0. Returns are
    ``A + V``.

    Args:
        rewards: [T] the reward of each token.
        values: [T] the value of the state before each token.

    Returns:
        [T] float64, 0 outside ``loss_mask``.
    """
    rows = np.flatnonzero(batch["loss_mask"])
    counts = batch.sum_by_sequence(batch["loss_mask"]).astype(np.int64)
    # The last sampled token of each sequence, among rows.
    last = np.cumsum(counts) - 1
    following = np.append(values[rows[1:]], 0.0)
    following[last[counts > 0]] = 0.0

    advantages = rewards[rows] + gamma * following - values[rows]
    # The longest sequences come first, so that those still going are a prefix.
    order = np.argsort(-counts, kind="stable")
    last, counts = last[order], counts[order]
    for back in range(1, counts.max(initial=0)):
        here = last[: np.searchsorted(-counts, -back)] - back
        advantages[here] += gamma * lam * advantages[here + 1]

    whole = np.zeros(batch.num_tokens)
    whole[rows] = advantages
    return whole


def to_come(batch: Batch, rewards: np.ndarray) -> np.ndarray:
    """Return [T] the sum of the rewards of a token and of the sampled ones after it in
    its row, 0 outside ``loss_mask``.
    """
    return estimate(
        batch,
        rewards,
        np.zeros(batch.num_tokens),
        1.0,
        1.0,
    )


def whiten(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Shift and scale [T] to mean 0 and standard deviation 1 over ``mask``.

    The result is 0 outside the mask, and everywhere if all values are equal.
    """
    if not mask.any():
        return np.zeros_like(values)
    centred = np.where(
        mask,
        values - values[mask].mean(),
        0.0,
    )
    return centred / (centred[mask].std() + 1e-8)
