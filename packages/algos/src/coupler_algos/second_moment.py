"""Drop the tokens of a batch that moved too far: M2PO (arXiv 2510.01161).

The second moment is the mean of ``(log p_recomputed - log p_rollout)^2``. As in the
code of its authors it is taken over tokens that moved in the direction of their
advantage: up where A > 0, down where A < 0. It is computed on the controller, before
the batch's first step, so that no split into micro-batches changes it.
"""

from __future__ import annotations

import numpy as np

from coupler.batch import Batch
from coupler_algos.config import PolicyConfig

FAR = "far"
"""The column [T] float32 that is 1 at dropped tokens and 0 elsewhere."""


def far(config: PolicyConfig, batch: Batch) -> np.ndarray:
    """Return the column :data:`FAR` for a batch with ``advantages``.

    Of the tokens that moved in the direction of their advantage, those with the largest
    moves are dropped, equal ones together, until the second moment of the others is at
    most ``second_moment``.
    """
    rows = np.flatnonzero(batch["loss_mask"])
    columns = (batch["old_logprobs"], batch["rollout_logprobs"])
    recomputed, rollout = (column[rows].astype(np.float64) for column in columns)
    moved = recomputed - rollout
    onward = moved * batch["advantages"][rows] > 0

    squares = moved[onward] ** 2
    values, counts = np.unique(squares, return_counts=True)
    moments = np.cumsum(values * counts) / np.cumsum(counts)
    kept = values[moments <= config.second_moment]
    limit = kept[-1] if len(kept) else -1.0

    dropped = np.zeros(batch.num_tokens, np.float32)
    dropped[rows[onward]] = squares > limit
    return dropped
