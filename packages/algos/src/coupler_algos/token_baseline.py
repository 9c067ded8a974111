"""Subtract the baseline of least variance at each position: OTB (arXiv 2602.07078).

The squared gradient of the log-prob of a token by its logits is

    ``w = 1 - 2 p + sum_v p_v^2``

for the token's probability p, which needs a forward pass alone. ``W_t``, the sum of w
over the tokens that a sample has up to its t-th, stands for the squared gradient up to
there, and the baseline of position t is

    ``B_t = sum_i R_i W_it / sum_i W_it``

over the samples i of the prompt that have t tokens. Positions count sampled tokens in
all turns. Where one sample is left, nothing is compared with it, and ``R - B`` is 0.
Where ``correction_cap`` weighs the loss of a token, it weighs w by the square.
"""

from __future__ import annotations

import numpy as np

from coupler.batch import Batch
from coupler_algos.config import GRPOConfig
from coupler_algos.groups import Groups
from coupler_algos.slots import Ratio
from coupler_algos.turns import Sampled
from coupler_algos.weighing import weights


def subtracted(config: GRPOConfig, batch: Batch, rewards: np.ndarray) -> np.ndarray:
    """Return [T] float64 ``R - B_t`` of each token, 0 outside ``loss_mask``.

    Args:
        batch: has ``old_logprobs``, ``sum_pi_squared`` and ``turn``.
        rewards: [N] of trajectories.
    """
    tokens = Sampled.of(batch)
    counts = np.bincount(tokens.trajectory)
    squared = np.split(
        _squared(config, batch, tokens),
        np.cumsum(counts)[:-1],
    )
    energy = np.concatenate([np.cumsum(part) for part in squared])
    position = np.concatenate([np.arange(len(part)) for part in squared])

    # one number for each position of each group
    _, group = np.unique(
        batch["group"],
        return_inverse=True,
    )
    longest = counts.max(initial=1)
    names = batch.spread(group)[tokens.rows] * longest + position
    groups = Groups(names, may_be_alone=True)

    whole = np.zeros(batch.num_tokens)
    whole[tokens.rows] = groups.minus_weighted(
        rewards[tokens.trajectory],
        energy,
    )
    return whole


def _squared(config: GRPOConfig, batch: Batch, tokens: Sampled) -> np.ndarray:
    """Return [n] the squared gradient of each sampled token."""
    p = np.exp(batch["old_logprobs"][tokens.rows].astype(np.float64))
    squares = batch["sum_pi_squared"][tokens.rows].astype(np.float64)
    # rounding takes that of a token that is certain below 0
    found = np.maximum(1 - 2 * p + squares, 0)
    if not config.correction_cap:
        return found

    place = tokens.trajectory
    if config.correction_ratio is Ratio.TOKEN:
        place = tokens.rows
    return found * weights(config, batch)[place] ** 2
