"""Proximal Policy Optimization (arXiv 1707.06347): each token is one action.

The reward stands at a sequence's last sampled token, minus ``kl_coef * KL`` at every
token. Advantages come from :mod:`coupler_algos.gae`. The policy's loss is eq. 7, the
critic's the squared error of eq. 9.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coupler.batch import Batch
from coupler.interfaces import Algorithm, Columns, Output
from coupler.metrics import Metrics
from coupler_algos import gae
from coupler_algos.config import KL, PPOConfig
from coupler_algos.policy import Policy
from coupler_algos.shaping import kl_coefficient, kl_per_token, overlong_penalty


class PPO(Policy):
    """Run ``algorithm=ppo``, by :class:`~coupler_algos.config.PPOConfig`."""

    config: PPOConfig
    critic = "coupler_algos.ppo:ValueLoss"

    def estimate(self, batch: Batch) -> Batch:
        """Add ``advantages`` and ``returns`` [T] float32; 0 outside ``loss_mask``."""
        config, mask = self.config, batch["loss_mask"]
        values = np.where(mask, batch["values"], 0).astype(np.float64)
        rewards = token_rewards(config, batch)
        estimated = gae.estimate(batch, rewards, values, config.gamma, config.lam)
        returns = estimated + values

        if config.whiten:
            estimated = gae.whiten(estimated, mask)
        return batch.with_tokens(
            advantages=estimated.astype(np.float32), returns=returns.astype(np.float32)
        )


class ValueLoss(Algorithm):
    """Train PPO's critic: minimise the error of its values against the returns."""

    config: PPOConfig
    want = (Output("values"),)
    whole_units = False

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.aggregation, self.constant = config.aggregation, config.aggregation_constant
        self.needs = frozenset({"values"})

    def advantages(self, batch: Batch) -> Batch:
        """Return the batch as it is, since PPO added ``returns``."""
        return batch

    def loss(self, out: Columns, batch: Columns) -> tuple[Any, Metrics]:
        """Return :func:`coupler_algos.losses.value_loss`."""
        from coupler_algos import losses

        return losses.value_loss(self.config, out, batch)


def token_rewards(config: PPOConfig, batch: Batch) -> np.ndarray:
    """Give every token its reward, with the penalties for KL and length.

    A batch with the column ``token_reward`` takes its rewards from there, and its
    ``reward`` is not added. Otherwise ``reward`` stands at each sequence's last token
    under ``loss_mask``.

    Returns:
        [T] float64; 0 outside ``loss_mask``.
    """
    mask = batch["loss_mask"]
    valid = batch.sum_by_sequence(mask)
    rows = np.flatnonzero(mask)
    # The last valid token of each sequence that has one.
    last = rows[np.cumsum(valid[valid > 0]).astype(np.int64) - 1]

    rewards = np.zeros(batch.num_tokens)
    if batch.has("token_reward"):
        rewards[rows] = batch["token_reward"][rows]
    else:
        rewards[last] = batch["reward"][valid > 0]

    if config.overlong_buffer_tokens:
        penalty = overlong_penalty(valid, config.overlong_max_tokens, config.overlong_buffer_tokens)
        rewards[last] += penalty[valid > 0]
    if config.kl is KL.IN_REWARD:
        coefficient = batch.spread(kl_coefficient(config, batch))
        rewards -= np.where(mask, coefficient * kl_per_token(config, batch), 0)
    return rewards
