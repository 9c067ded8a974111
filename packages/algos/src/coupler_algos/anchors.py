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
    """Return [T] float64 the advantage ``A_S`` of each token; 0 outside ``loss_mask``.

    Args:
        batch: has the columns ``turn`` and ``anchor``.
        rewards: [N] of trajectories, which stand at the last turn unless the batch has
            ``token_reward``.
    """
    tokens = Sampled.of(batch)
    both = np.stack([tokens.trajectory, tokens.turn])
    # true at the first token of each turn
    begins = np.ones(len(tokens.rows), bool)
    begins[1:] = (both[:, 1:] != both[:, :-1]).any(0)
    of_token, at = np.cumsum(begins) - 1, tokens.rows[begins]

    own = None
    if batch.has("token_reward"):
        own = np.bincount(of_token, batch["token_reward"][tokens.rows], minlength=len(at))
    returns = _returns(config, rewards, tokens.trajectory[begins], own)

    group = batch.spread(batch["group"])[at]
    pairs = np.stack([group, batch["anchor"][at]], axis=1)
    names = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    groups = Groups(names, may_be_alone=True)
    advantages = groups.centred(returns)
    if config.scale_by_std:
        advantages = advantages / (groups.std(returns) + EPSILON)

    whole = np.zeros(batch.num_tokens)
    whole[tokens.rows] = advantages[of_token]
    return whole


def _returns(
    config: GRPOConfig, rewards: np.ndarray, trajectory: np.ndarray, own: np.ndarray | None
) -> np.ndarray:
    """Return [n] the discounted return of each turn.

    Args:
        rewards: [N] of trajectories.
        trajectory: [n] that of each turn, in order.
        own: [n] the reward of each turn. None has that of the trajectory at its last.
    """
    counts = np.bincount(trajectory)
    lengths = counts[counts > 0]
    if own is None:
        last = np.cumsum(lengths) - 1
        own = np.zeros(len(trajectory))
        own[last] = rewards[trajectory[last]]

    turns = Batch(lengths, {"loss_mask": np.ones(len(own), bool)}, {})
    return gae.estimate(turns, own, np.zeros(len(own)), config.anchor_gamma, 1.0)
