"""Group Relative Policy Optimization: DeepSeekMath (arXiv 2402.03300) eq. 3.

Supervision is by outcome (section 4.1.2): ``A_i = (r_i - mean(r)) / std(r)`` over the
samples of one prompt. Without ``scale_by_std`` and with the aggregation ``constant`` it
is Dr. GRPO (arXiv 2503.20783). :mod:`coupler_algos.slots` names the other baselines.
Other scales are those of MaxRL (arXiv 2602.02710), REINFORCE++ (arXiv 2501.03262), GPG
(arXiv 2504.02546) and GDPO (arXiv 2601.05242). ``anchor_coef`` adds the advantages of
turns of GiGPO (arXiv 2505.10978).
"""

from __future__ import annotations

import numpy as np

from coupler.batch import Batch
from coupler.errors import CouplerError
from coupler.interfaces import Controller
from coupler_algos import anchors, token_baseline
from coupler_algos.config import GRPOConfig
from coupler_algos.gae import whiten
from coupler_algos.groups import EPSILON, Groups
from coupler_algos.moving import MovingMeans, moving_mean
from coupler_algos.policy import GroupPolicy
from coupler_algos.shaping import sampled_tokens, scores
from coupler_algos.slots import Baseline

PARTS = "reward_parts/"
"""The names of columns with the parts of rewards begin so."""


class GRPO(GroupPolicy):
    """Run ``algorithm=grpo``, by :class:`~coupler_algos.config.GRPOConfig`."""

    config: GRPOConfig

    def controller(self) -> Controller | None:
        """Return the moving means, or the adaptive KL coefficient, if there is one."""
        if self.config.baseline is Baseline.MOVING_MEAN:
            return MovingMeans(self.config)
        return super().controller()

    def compare(self, scores: np.ndarray, groups: Groups, lengths: np.ndarray) -> np.ndarray:
        match self.config.baseline:
            case Baseline.MEAN:
                advantages = groups.centred(scores)
            case Baseline.LENGTH_WEIGHTED:
                advantages = groups.minus_weighted(scores, lengths)
            case Baseline.SECOND_BEST:
                advantages = groups.best_minus_second(scores)
            case Baseline.GREEDY | Baseline.OPTIMAL_TOKEN | Baseline.MOVING_MEAN | Baseline.NONE:
                # judge() and judge_tokens() subtract these
                advantages = scores

        return self.scaled(advantages, scores, groups)

    def scaled(self, advantages: np.ndarray, scores: np.ndarray, groups: Groups) -> np.ndarray:
        """Scale [N] advantages by what the scores of their groups are like."""
        if self.config.scale_by_informative:
            informative = int(groups.differ(scores).sum())
            advantages = advantages * (len(scores) / max(informative, 1))
        if self.config.scale_by_std:
            return advantages / (groups.std(scores) + EPSILON)
        if self.config.scale_by_mean:
            # Where all rewards are 0 there is nothing to learn. A mean near 0 of
            # rewards with both signs would make advantages of any size.
            mean = groups.mean(scores)
            return np.where(mean > 0, advantages, 0) / np.where(mean > 0, mean, 1)
        return advantages

    def judge_tokens(self, batch: Batch, groups: Groups) -> np.ndarray:
        """Return [T] the advantage of each token, also outside ``loss_mask``.

        Raises:
            CouplerError: under ``by_part``, rewards have no parts.
        """
        if self.config.baseline is Baseline.OPTIMAL_TOKEN:
            return self._by_token(batch, groups)
        advantages = super().judge_tokens(batch, groups)
        if not self.config.anchor_coef:
            return advantages

        of_turns = anchors.compared(
            self.config,
            batch,
            scores(self.config, batch),
        )
        return advantages + self.config.anchor_coef * of_turns

    def _by_token(self, batch: Batch, groups: Groups) -> np.ndarray:
        rewards = scores(self.config, batch)
        ahead = token_baseline.subtracted(
            self.config,
            batch,
            rewards,
        )

        scale = self.scaled(
            np.ones_like(rewards),
            rewards,
            groups,
        )
        _, of_row = batch.trajectories()
        return batch.spread(scale[of_row]) * ahead

    def judge(self, batch: Batch, groups: Groups) -> np.ndarray:
        """Return [N] the advantage of each trajectory.

        Raises:
            CouplerError: under ``by_part``, rewards have no parts, or not those that
                have a weight.
        """
        if self.config.by_part:
            return self._by_part(batch, groups)
        rewards = scores(self.config, batch)
        if self.config.baseline is Baseline.GREEDY:
            rewards = rewards - batch["greedy_reward"][batch.trajectories()[0]]
        if self.config.baseline is Baseline.MOVING_MEAN:
            rewards = rewards - moving_mean(batch)
        return self.compare(rewards, groups, sampled_tokens(batch))

    def _by_part(self, batch: Batch, groups: Groups) -> np.ndarray:
        """Add up advantages by each part of the rewards: GDPO (arXiv 2601.05242)."""
        columns = (name for name in batch.seqs if name.startswith(PARTS))
        names = sorted(name.removeprefix(PARTS) for name in columns)
        _check_parts(names, list(self.config.part_weights))
        first, lengths = batch.trajectories()[0], sampled_tokens(batch)
        total = np.zeros(len(first))

        for name in names:
            part = batch[f"{PARTS}{name}"][first].astype(np.float64)
            weight = self.config.part_weights.get(name, 1.0)
            total += weight * self.compare(
                part,
                groups,
                lengths,
            )

        return total

    def estimate(self, batch: Batch) -> Batch:
        """Add ``advantages`` [T] float32; 0 outside ``loss_mask``.

        Raises:
            CouplerError: a group has one trajectory only, or rewards lack parts.
        """
        batch = super().estimate(batch)
        if not self.config.whiten:
            return batch

        wide = batch["advantages"].astype(np.float64)
        return batch.with_tokens(
            advantages=whiten(wide, batch["loss_mask"]).astype(np.float32),
        )


def _check_parts(found: list[str], weighed: list[str]) -> None:
    if not found:
        raise CouplerError(
            "algorithm.by_part=true compares the parts of rewards, and these have none.\n"
            "  try:  a reward that returns coupler.rewards.Graded(reward, parts={...})"
        )
    if unknown := sorted(set(weighed) - set(found)):
        raise CouplerError(
            f"algorithm.part_weights weighs {unknown[0]}, which no reward has as a part.\n"
            f"  its parts are:  {', '.join(found)}"
        )
