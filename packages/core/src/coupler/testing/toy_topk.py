"""Compute the most likely ids of the toy policy, and the log-probs of given ids."""

from __future__ import annotations

import numpy as np

from coupler.batch import Batch
from coupler.batch.columns import TOP_IDS

TOP_LOGPROBS = "top_logprobs"  # an output
LOW = -1e30  # the log-prob of what is cut off, which times 0 is 0


def top_outputs(batch: Batch, rows: np.ndarray, log_p: np.ndarray, k: int) -> dict[str, np.ndarray]:
    """Return the ``k`` most likely ids, or those of the batch where k is 0, and their
    log-probs, [T, k] each. Both are 0 outside ``loss_mask``.

    Args:
        rows: [n] the rows under ``loss_mask``.
        log_p: [n, V] their distributions.
    """
    found: dict[str, np.ndarray] = {}
    if k:
        likely = np.argsort(-log_p, 1, kind="stable")[:, :k]
        ids = np.zeros((batch.num_tokens, k), np.int32)
        ids[rows] = -1
        ids[rows, : likely.shape[1]] = likely
        found[TOP_IDS] = ids
    elif not batch.has(TOP_IDS):
        return {}

    ids = (found or batch.tokens)[TOP_IDS]
    mine = ids[rows]
    at_ids = np.take_along_axis(log_p, mine.clip(0), 1)
    found[TOP_LOGPROBS] = np.zeros(ids.shape)
    found[TOP_LOGPROBS][rows] = np.where(mine < 0, LOW, at_ids)
    return found
