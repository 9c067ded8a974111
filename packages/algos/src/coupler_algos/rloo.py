"""REINFORCE Leave-One-Out: "Back to Basics" (arXiv 2402.14740).

``A_i = r_i - mean of the other r_j`` over the samples of one prompt. A completion is
one action: the gradient is ``-A_i * grad log p(completion)``, the sum over its tokens.
If the policy has moved since sampling, the gradient is weighted by the probability
ratio of the whole sequence.
"""

from __future__ import annotations

import numpy as np

from coupler_algos.groups import Groups
from coupler_algos.policy import GroupPolicy


class RLOO(GroupPolicy):
    """Run ``algorithm=rloo``, by :class:`~coupler_algos.config.RLOOConfig`."""

    def compare(self, scores: np.ndarray, groups: Groups, lengths: np.ndarray) -> np.ndarray:
        return groups.minus_others(scores)
