"""Mark the few tokens that drive the entropy down: arXiv 2505.22617.

They are those with the largest covariance of log-prob and advantage (section 4.2):
``cov_t = (log p_t - mean(log p)) * (A_t - mean(A))``, with means over the sampled
tokens of the batch. The marks are made on the controller, so that no split into
micro-batches changes them.
"""

from __future__ import annotations

import numpy as np

from coupler.batch import Batch
from coupler_algos.config import Behaviour, PolicyConfig

MARKED = "marked"
"""The column [T] float32 that is 1 at marked tokens and 0 elsewhere."""


def marks(config: PolicyConfig, batch: Batch) -> np.ndarray:
    """Return the column :data:`MARKED` for a batch with ``advantages``.

    ``covariance_share`` of the sampled tokens are marked, at least one if any
    qualifies. Without limits they are those with the largest covariance (KL-Cov). With
    limits they are drawn from the tokens between them (Clip-Cov), by a hash of log-prob
    and position: neither the order of rows nor a generator decides.
    """
    by_rollout = config.behaviour is Behaviour.ROLLOUT
    rows = np.flatnonzero(batch["loss_mask"])
    logprobs = batch["rollout_logprobs" if by_rollout else "old_logprobs"][rows]
    covariance = _centred(logprobs) * _centred(batch["advantages"][rows])

    low, high = config.covariance_low, config.covariance_high
    inside = (covariance > low if low else True) & (covariance < high if high else True)
    candidates = np.flatnonzero(np.broadcast_to(inside, covariance.shape))
    position = np.arange(batch.num_tokens) - batch.spread(batch.starts[:-1])
    drawn = _hash(logprobs, position[rows])[candidates]
    order = np.lexsort((drawn,) if low or high else (drawn, -covariance[candidates]))

    number = max(int(config.covariance_share * len(rows)), 1)
    marked = np.zeros(batch.num_tokens, np.float32)
    marked[rows[candidates[order[:number]]]] = 1
    return marked


def _centred(values: np.ndarray) -> np.ndarray:
    wide = values.astype(np.float64)
    return wide - wide.mean() if len(wide) else wide


def _hash(logprobs: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return [n] uint32, spread evenly by the finalizer of MurmurHash3."""
    bits = logprobs.astype(np.float32).view(np.uint32) ^ position.astype(np.uint32)
    bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return bits ^ (bits >> np.uint32(16))
