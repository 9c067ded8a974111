"""Group Relative Policy Optimization: DeepSeekMath (arXiv 2402.03300) eq. 3.

Supervision is by outcome (section 4.1.2): ``A_i = (r_i - mean(r)) / std(r)`` over the
samples of one prompt. Without ``scale_by_std`` and with the aggregation ``constant`` it
is Dr. GRPO (arXiv 2503.20783).
"""

from __future__ import annotations

import numpy as np

from coupler_algos.groups import Groups
from coupler_algos.policy import GroupPolicy

_EPSILON = 1e-6


class GRPO(GroupPolicy):
    """Run ``algorithm=grpo``, by :class:`~coupler_algos.config.GRPOConfig`."""

    def compare(self, scores: np.ndarray, groups: Groups) -> np.ndarray:
        centred = groups.centred(scores)
        return centred / (groups.std(scores) + _EPSILON) if self.config.scale_by_std else centred
