"""Compare turns that were shown the same: GiGPO (arXiv 2505.10978), step level.

Turns of a prompt's samples that share an anchor, what the environment showed before
them, are a group. With ``R_t = sum_k gamma^(k - t) r_k`` over the turns k from t on,

    ``A_S(t) = (R_t - mean(R)) / F``

over this group, where F is the group's standard deviation, or 1 without
``scale_by_std``. The advantage of a token is ``A_E + anchor_coef * A_S`` of its turn,
with the advantage ``A_E`` of its trajectory. A turn whose anchor is its own has 0.
"""

from __future__ import annotations

import numpy as np

from coupler.batch import Batch
from coupler_algos import gae
from coupler_algos.config import GRPOConfig
from coupler_algos.groups import EPSILON, Groups
from coupler_algos.turns import Sampled


def compared(config: GRPOConfig, batch: Batch, rewards: np.ndarray) -> np.ndarray:
    """Return [T] float64 the advantage ``A_S`` of each token, 0 outside ``loss_mask``.

    Args:
        batch: has the columns ``turn`` and ``anchor``.
        rewards: [N] of trajectories, which stand at the last turn unless the batch has
            ``token_reward``.
    """
    tokens = Sampled.of(batch)
    first, of_token = tokens.turns()
    at = tokens.rows[first]
    trajectory = tokens.trajectory[first]

    if batch.has("token_reward"):
        own = np.bincount(
            of_token,
            batch["token_reward"][tokens.rows],
            minlength=len(at),
        )
    else:
        own = np.where(
            np.append(trajectory[1:] != trajectory[:-1], True)[: len(at)],
            rewards[trajectory],
            0.0,
        )
    returns = _discounted(
        own,
        trajectory,
        config.anchor_gamma,
    )

    pairs = np.stack(
        [batch.spread(batch["group"])[at], batch["anchor"][at]],
        axis=1,
    )
    _, names = np.unique(
        pairs,
        axis=0,
        return_inverse=True,
    )
    groups = Groups(names.reshape(-1), may_be_alone=True)
    advantages = groups.centred(returns)
    if config.scale_by_std:
        deviation = groups.std(returns)
        advantages = advantages / (deviation + EPSILON)

    whole = np.zeros(batch.num_tokens)
    whole[tokens.rows] = advantages[of_token]
    return whole


def _discounted(own: np.ndarray, trajectory: np.ndarray, gamma: float) -> np.ndarray:
    """Return [n] the discounted return of each turn.

    Args:
        own: [n] the reward of each turn.
        trajectory: [n] that of each turn, in order.
    """
    counts = np.bincount(trajectory)
    turns = Batch(
        counts[counts > 0],
        {"loss_mask": np.ones(len(own), bool)},
        {},
    )

    return gae.estimate(
        turns,
        own,
        np.zeros(len(own)),
        gamma,
        1.0,
    )
