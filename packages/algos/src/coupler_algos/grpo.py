"""Group Relative Policy Optimization: DeepSeekMath (arXiv 2402.03300) eq. 3.

Supervision is by outcome (section 4.1.2): ``A_i = (r_i - mean(r)) / std(r)`` over the
samples of one prompt. Without ``scale_by_std`` and with the aggregation ``constant`` it
is Dr. GRPO (arXiv 2503.20783). Other baselines and scales are those of OPO (arXiv
2505.23585), MaxRL (arXiv 2602.02710) and REINFORCE++ (arXiv 2501.03262).
"""

from __future__ import annotations

import numpy as np

from coupler.batch import Batch
from coupler_algos.config import Baseline
from coupler_algos.gae import whiten
from coupler_algos.groups import Groups
from coupler_algos.policy import GroupPolicy

_EPSILON = 1e-6


class GRPO(GroupPolicy):
    """Run ``algorithm=grpo``, by :class:`~coupler_algos.config.GRPOConfig`."""

    def compare(self, scores: np.ndarray, groups: Groups, lengths: np.ndarray) -> np.ndarray:
        if self.config.baseline is Baseline.LENGTH_WEIGHTED:
            centred = groups.minus_weighted(scores, lengths)
        else:
            centred = groups.centred(scores)

        if self.config.scale_by_std:
            return centred / (groups.std(scores) + _EPSILON)
        if self.config.scale_by_mean:
            # Where all rewards are 0 there is nothing to learn.
            return centred / np.maximum(groups.mean(scores), _EPSILON)
        return centred

    def advantages(self, batch: Batch) -> Batch:
        """Add ``advantages`` [T] float32; 0 outside ``loss_mask``.

        Raises:
            CouplerError: a group has one trajectory only.
        """
        batch = super().advantages(batch)
        if not self.config.whiten:
            return batch

        wide = batch["advantages"].astype(np.float64)
        return batch.with_tokens(
            advantages=whiten(wide, batch["loss_mask"]).astype(np.float32),
        )
