"""Share columns and the policy's loss between algorithms.

GRPO and RLOO also share how they compare the samples of one prompt.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from coupler.batch import Batch
from coupler.batch.columns import of_policy
from coupler.interfaces import Algorithm, Columns, Controller, Output
from coupler.metrics import Metrics
from coupler_algos import components, gae
from coupler_algos.adaptive import AdaptiveKL
from coupler_algos.config import KL, GroupConfig, PolicyConfig
from coupler_algos.covariance import MARKED, marks
from coupler_algos.groups import Groups
from coupler_algos.second_moment import FAR, far
from coupler_algos.shaping import kl_coefficient, kl_per_token, sampled_tokens, scores
from coupler_algos.teaching import taught, without_rewards
from coupler_algos.weighing import MEAN_WEIGHT, mean_weight


class Policy(Algorithm):
    """Base class of every algorithm with a ratio of probabilities."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self.aggregation, self.constant = config.aggregation, config.aggregation_constant
        self.needs, self.always = config.needs, config.always
        self.whole_units = config.reads_sequences
        entropy = (Output("entropy"),) if config.log_entropy or config.entropy_coef else ()
        self.want = (Output("logprobs"), *entropy)

    @abstractmethod
    def estimate(self, batch: Batch) -> Batch:
        """Add ``advantages`` [T] float32; 0 outside ``loss_mask``."""

    def judged(self, batch: Batch) -> Batch:
        """Add the ``advantages`` of rewards, or zeros where these do not count."""
        return self.estimate(batch) if self.config.reward_coef else without_rewards(batch)

    def advantages(self, batch: Batch) -> Batch:
        """Add ``advantages``, and what the loss has to know of the whole batch.

        Raises:
            CouplerError: the samples of a prompt cannot be compared.
        """
        batch = self.judged(batch)
        if self.config.teacher_coef:
            batch = taught(self.config, batch)

        if self.config.covariance_share:
            batch = batch.with_tokens(**{MARKED: marks(self.config, batch)})

        if self.config.second_moment:
            batch = batch.with_tokens(**{FAR: far(self.config, batch)})

        if self.config.correction_normalize:
            mean = np.full(
                len(batch),
                mean_weight(self.config, of_policy(batch)),
                np.float32,
            )
            batch = batch.with_seqs(**{MEAN_WEIGHT: mean})
        return batch

    def loss(self, out: Columns, batch: Columns) -> tuple[Any, Metrics]:
        """Return :func:`coupler_algos.losses.policy_loss`."""
        from coupler_algos import losses

        return losses.policy_loss(
            self.config,
            out,
            batch,
        )

    def controller(self) -> Controller | None:
        """Return an adaptive KL coefficient if ``kl_target`` is set."""
        return AdaptiveKL(self.config) if self.config.kl_target else None


class GroupPolicy(Policy):
    """Base class of GRPO and RLOO.

    A trajectory has one advantage, the same for all its tokens unless
    :meth:`judge_tokens` or ``kl=in_return`` says otherwise. With ``sources`` the loss
    has parts, by the kind of row.
    """

    def __init__(self, config: GroupConfig) -> None:
        super().__init__(config)
        self.components = components.columns_of(config)
        if config.has_component("gkd"):
            self.want = (*self.want, Output("top_logprobs"))

    def judged(self, batch: Batch) -> Batch:
        """Add the ``advantages`` of rewards, with ``sources`` those of each part."""
        if not self.components:
            return super().judged(batch)
        return components.split(
            self.config,
            batch,
            self.estimate,
        )

    def loss(self, out: Columns, batch: Columns) -> tuple[Any, Metrics]:
        """Return :func:`coupler_algos.mixing.mixed_loss` where the loss has parts."""
        if not self.components:
            return super().loss(out, batch)
        from coupler_algos import mixing

        return mixing.mixed_loss(
            self.config,
            out,
            batch,
        )

    @abstractmethod
    def compare(self, scores: np.ndarray, groups: Groups, lengths: np.ndarray) -> np.ndarray:
        """Turn [N] scores of trajectories into [N] advantages.

        Args:
            lengths: [N] the tokens that each trajectory sampled.
        """

    def judge(self, batch: Batch, groups: Groups) -> np.ndarray:
        """Return [N] the advantage of each trajectory."""
        return self.compare(
            scores(self.config, batch),
            groups,
            sampled_tokens(batch),
        )

    def judge_tokens(self, batch: Batch, groups: Groups) -> np.ndarray:
        """Return [T] the advantage of each token, also outside ``loss_mask``."""
        _, of_row = batch.trajectories()
        return batch.spread(self.judge(batch, groups)[of_row])

    def estimate(self, batch: Batch) -> Batch:
        """Add ``advantages`` [T] float32; 0 outside ``loss_mask``.

        Raises:
            CouplerError: a group has one trajectory only.
        """
        first, _ = batch.trajectories()
        groups = Groups(batch["group"][first], may_be_alone=not self.config.compares)
        per_token = self.judge_tokens(batch, groups)

        if self.config.kl is KL.IN_RETURN:
            coefficient = batch.spread(kl_coefficient(self.config, batch))
            penalty = coefficient * kl_per_token(self.config, batch)
            per_token = per_token - gae.to_come(batch, penalty)
        return batch.with_tokens(
            advantages=np.where(
                batch["loss_mask"],
                per_token,
                0,
            ).astype(np.float32)
        )

    def num_sampled(self, data_source: str, samples: int, draw: float) -> int:
        """Return 0 where the loss of the source has the part ``demo`` alone.

        Beside other parts, the answer takes the place of one sample. With ``gkd``, a
        share of 1 - lambda of the prompts has answers in the place of all samples:
        arXiv 2306.13649, algorithm 1.
        """
        parts = self.config.parts_of(data_source)
        if "gkd" in parts and draw >= self.config.gkd_lambda:
            return 0
        if "demo" not in parts:
            return samples
        return samples - 1 if len(parts) > 1 else 0

    def keep(self, group: Batch) -> bool:
        """Reject a group whose rewards are all equal, if ``dynamic_sampling`` is set.

        The rewards are those before shaping: DAPO (arXiv 2503.14476) eq. 11. A group
        whose loss has no part of rewards is kept.
        """
        group = of_policy(group)
        if not self.config.dynamic_sampling or not len(group):
            return True

        if self.components:
            rewarded = components.coefficients(
                self.config,
                group,
                "rl",
            )
            if not rewarded.any():
                return True
        return bool(np.ptp(group["reward"]) > 0)
