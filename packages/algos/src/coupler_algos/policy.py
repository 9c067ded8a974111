"""What algorithms share: columns, the policy's loss, and how GRPO and RLOO compare the samples of one prompt."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from coupler.batch import Batch
from coupler.interfaces import Algorithm, Columns, Controller, Output
from coupler.metrics import Metrics
from coupler_algos.adaptive import AdaptiveKL
from coupler_algos.config import PolicyConfig
from coupler_algos.groups import Groups, trajectories
from coupler_algos.shaping import scores


class Policy(Algorithm):
    """Base of every algorithm with a ratio of probabilities."""

    sequence_ratio = False  # True: one probability ratio per sequence, not per token

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self.aggregation, self.constant = config.aggregation, config.aggregation_constant
        self.needs, self.always = config.needs, config.always
        entropy = (Output("entropy"),) if config.log_entropy or config.entropy_coef else ()
        self.want = (Output("logprobs"), *entropy)

    def loss(self, out: Columns, batch: Columns) -> tuple[Any, Metrics]:
        """See :func:`coupler_algos.losses.policy_loss`."""
        from coupler_algos import losses

        return losses.policy_loss(self.config, out, batch, self.sequence_ratio)

    def controller(self) -> Controller | None:
        """With ``kl_target``, return an :class:`~coupler_algos.adaptive.AdaptiveKL`."""
        return AdaptiveKL(self.config) if self.config.kl_target else None


class GroupPolicy(Policy):
    """Base of GRPO and RLOO. One advantage per trajectory, the same for all its tokens."""

    @abstractmethod
    def compare(self, scores: np.ndarray, groups: Groups) -> np.ndarray:
        """[N] scores of trajectories -> [N] advantages."""

    def advantages(self, batch: Batch) -> Batch:
        """Add ``advantages`` [T] float32; 0 outside ``loss_mask``.

        Raises:
            CouplerError: a group has one trajectory only.
        """
        first, of_row = trajectories(batch)
        per_trajectory = self.compare(scores(self.config, batch), Groups(batch["group"][first]))
        per_token = batch.spread(per_trajectory[of_row])
        return batch.with_tokens(advantages=np.where(batch["loss_mask"], per_token, 0).astype(np.float32))

    def keep(self, group: Batch) -> bool:
        """With ``dynamic_sampling``, reject a group whose rewards, before shaping, are all equal.

        DAPO (arXiv 2503.14476) eq. 11.
        """
        return not self.config.dynamic_sampling or bool(np.ptp(group["reward"]) > 0)
