"""Define what users set under ``algorithm``.

This module imports nothing heavy: core reads it before a backend is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from coupler.interfaces import Aggregation
from coupler_algos.slots import Baseline, Correction, Ratio, Shape

OTHERS = "*"
"""The key of ``algorithm.sources`` for rows whose source it does not name."""


class KL(StrEnum):
    """Name the place where the divergence from the reference policy enters."""

    NONE = "none"
    IN_REWARD = "in_reward"
    IN_RETURN = "in_return"
    """The divergence of a token counts against it and the sampled tokens before it in
    its row: REINFORCE++ (arXiv 2501.03262)."""
    IN_LOSS = "in_loss"


REWARDED = (KL.IN_REWARD, KL.IN_RETURN)
"""The places from which it reaches the policy through advantages of rewards."""


class KLEstimator(StrEnum):
    """Choose how the divergence of a token is estimated.

    :mod:`coupler_algos.kl` has the value and the gradient of each.
    """

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class Behaviour(StrEnum):
    """Choose whose log-probs are the denominator of the ratio."""

    RECOMPUTED = "recomputed"
    """The trainer's log-probs, before the batch's first optimizer step."""
    ROLLOUT = "rollout"
    """The log-probs that the rollout reported when it sampled."""


@dataclass
class PolicyConfig:
    """Hold what GRPO, RLOO and PPO share. In every number, 0 switches the part off."""

    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """How the losses of tokens add up to the loss of a step."""
    aggregation_constant: int = 0
    """The divisor of each sequence's loss under aggregation=constant, in tokens."""
    ratio: Ratio = Ratio.TOKEN
    """What one ratio of probabilities is of: a token, a sequence, or the geometric mean
    of a sequence."""
    shape: Shape = Shape.CLIP
    """How ratio and advantage become a loss."""
    clip_low: float = 0.0
    """The ratio is clipped below at 1 - clip_low. 0 does not clip it there. Under
    shape=tv_mask it limits how far a probability falls."""
    clip_high: float = 0.0
    """The ratio is clipped above at 1 + clip_high. 0 does not clip it there. Under
    shape=tv_mask it limits how far a probability rises."""
    dual_clip: float = 0.0
    """Bound the loss of a negative advantage at -advantage * dual_clip. It must be
    above 1, or 0 for no bound.
    """
    gate_positive: float = 1.0
    """The steepness of shape=gate where the advantage is positive."""
    gate_negative: float = 1.05
    """The steepness of shape=gate where the advantage is negative."""
    kernel_power_positive: float = 2.0
    """The power of the ratio in shape=gamma_kernel where the advantage is positive."""
    kernel_rate_positive: float = 3.0
    """The rate at which shape=gamma_kernel falls where the advantage is positive."""
    kernel_power_negative: float = 3.0
    """The power of the ratio in shape=gamma_kernel where the advantage is negative."""
    kernel_rate_negative: float = 2.0
    """The rate at which shape=gamma_kernel falls where the advantage is negative."""
    behaviour: Behaviour = Behaviour.RECOMPUTED
    """The log-probs in the denominator of the ratio: recomputed by the trainer before
    the batch's first optimizer step, or reported by the rollout."""
    correction_cap: float = 0.0
    """Weigh the loss with min(recomputed / rollout probability, correction_cap). 0 does
    not weigh it.
    """
    correction: Correction = Correction.TRUNCATE
    """What becomes of the weight above correction_cap: truncate takes the cap, and mask
    drops the token, also below correction_floor."""
    correction_floor: float = 0.0
    """The least weight that correction=mask keeps."""
    correction_ratio: Ratio = Ratio.TOKEN
    """What the weight of correction_cap is of: a token, a sequence, or the geometric
    mean of a sequence."""
    correction_normalize: bool = False
    """Divide the weights of correction_cap by their mean over the batch."""
    reject: dict[str, float] = field(default_factory=dict)
    """Drop tokens whose trainer and rollout diverge by more than a bound in nats. The
    keys join token, sequence_sum, sequence_mean or sequence_max with k1, k2, k3 or
    binary.
    """
    log_mismatch: bool = False
    """Measure how far the trainer's distribution is from the rollout's, also by
    sequence: effective sample size, chi2 and perplexities."""
    opsm_delta: float = 0.0
    """Drop a sequence with a negative advantage whose mean log-prob fell by more than
    this many nats since it was sampled. 0 drops none.
    """
    second_moment: float = 0.0
    """Drop tokens that moved farthest from the rollout in the direction of their
    advantage, until the mean squared log-ratio of the others is at most this. 0 drops
    none.
    """
    covariance_share: float = 0.0
    """Mark this share of tokens, those with the largest covariance of log-prob and
    advantage. 0 marks none.
    """
    covariance_low: float = 0.0
    """Marked tokens have a covariance above this. They are drawn at random between
    limits. 0 is no limit.
    """
    covariance_high: float = 0.0
    """Marked tokens have a covariance below this. 0 is no limit."""
    covariance_kl: float = 0.0
    """The weight of abs(log ratio) in the loss of marked tokens. With 0 they get no
    gradient of the policy loss.
    """
    proximal_coef: float = 0.0
    """The weight of the squared log-ratio of each token in the loss. 0 adds none."""
    teacher_coef: float = 0.0
    """The weight of log-prob of the teacher - log-prob of the policy in the advantage
    of each token. 0 asks no teacher.
    """
    reward_coef: float = 1.0
    """The weight of the advantages of rewards beside a teacher's. With 0 rewards are
    measured, and nothing learns from them.
    """
    kl: KL = KL.NONE
    """Where the divergence from the reference enters: in the reward of a trajectory, in
    the return of each token, in the loss, or nowhere."""
    kl_coef: float = 0.0
    """The weight of the divergence from the reference. With kl_target, it is the weight
    of the first step.
    """
    kl_target: float = 0.0
    """The divergence that an adaptive coefficient aims at, in nats per trajectory. 0
    keeps kl_coef as it is.
    """
    kl_horizon: int = 10_000
    """Trajectories over which the adaptive coefficient follows the divergence. More
    make it slower.
    """
    kl_estimator: KLEstimator = KLEstimator.K3
    """How the divergence of a token is estimated, in the reward or in the loss."""
    entropy_coef: float = 0.0
    """The weight of an entropy bonus in the loss. 0 gives none."""
    log_entropy: bool = True
    """Compute the entropy for the log also where the loss has no entropy bonus."""
    overlong_buffer_tokens: int = 0
    """A completion loses up to 1 of its reward over its last tokens before
    overlong_max_tokens, this many of them. 0 takes nothing.
    """
    overlong_max_tokens: int = 0
    """The length at which a completion loses a whole reward of 1, usually
    ${sampling.max_tokens}."""

    @property
    def needs(self) -> frozenset[str]:
        """Return the columns that core adds under this configuration
        (``Algorithm.needs``).
        """
        reference = {"ref_logprobs"} if self.kl is not KL.NONE else set()
        old = {"old_logprobs"} if self.behaviour is Behaviour.RECOMPUTED else set()
        teacher = {"teacher_logprobs"} if self.teacher_coef else set()
        return frozenset(reference | old | teacher | self.always)

    @property
    def reads_sequences(self) -> bool:
        """Return whether a loss reads all tokens that its trajectory sampled
        (``Algorithm.whole_units``).
        """
        weighs = self.correction_cap > 0 and self.correction_ratio is not Ratio.TOKEN
        rejects = any(key.startswith("sequence") for key in self.reject)
        drops = self.opsm_delta > 0 or self.log_mismatch
        return self.ratio is not Ratio.TOKEN or weighs or rejects or drops

    @property
    def measures_mismatch(self) -> bool:
        """Return whether the loss compares recomputed and reported log-probs."""
        return self.correction_cap > 0 or bool(self.reject) or self.log_mismatch

    @property
    def always(self) -> frozenset[str]:
        """Return the columns that are read before training (``Algorithm.always``).

        For KL the policy's log-probs come from the trainer, as the reference's do.
        Those of the rollout differ by rounding, which would count as divergence.
        """
        marks = self.covariance_share > 0 and self.behaviour is Behaviour.RECOMPUTED
        in_advantage = self.kl in REWARDED or self.kl_target > 0
        taught = self.teacher_coef > 0 and self.behaviour is Behaviour.RECOMPUTED
        bounds = self.second_moment > 0 or self.correction_normalize
        reads = in_advantage or marks or taught or bounds
        return frozenset({"old_logprobs"} if reads else ())


@dataclass
class GroupConfig(PolicyConfig):
    """Hold what GRPO and RLOO share: they compare the samples of one prompt."""

    dynamic_sampling: bool = False
    """Sample another group in place of one whose rewards are all equal."""
    sources: dict[str, Any] = field(default_factory=dict)
    """The weights of rl, ce, ref, teacher, demo and gkd in the loss of rows of each
    data_source, such as {math: {rl: 1}, chat: {demo: 1}}, where * is all other sources.
    Each of the parts is normalised over its own tokens. Without a source all rows have
    one loss."""
    ce_above: float = 0.0
    """The part ce of the loss learns samples with a reward above this."""
    gkd_beta: float = 0.0
    """The divergence of the part gkd: 0 is KL(teacher || policy), 1 KL(policy ||
    teacher), and between them the generalized Jensen-Shannon divergence."""
    gkd_lambda: float = 1.0
    """The share of prompts with the part gkd that the policy samples. The others are
    read with the answers of their rows."""

    def has_component(self, name: str) -> bool:
        """Return whether a source has this part of the loss."""
        return any(parts.get(name) for parts in self.sources.values())

    def parts_of(self, source: str) -> dict[str, float]:
        """Return the weights of the parts in rows of a source.

        None are those of a source that is not named.
        """
        return self.sources.get(source, self.sources.get(OTHERS, {}))

    @property
    def compares(self) -> bool:
        """Return whether a sample needs another one of its prompt."""
        return self.reward_coef > 0 and (not self.sources or self.has_component("rl"))

    @property
    def needs(self) -> frozenset[str]:
        """Return the columns of every policy, and those of the parts of the loss."""
        columns = {
            "ref": "ref_logprobs",
            "teacher": "teacher_logprobs",
            "demo": "demonstration",
            "gkd": "teacher_top_logprobs",
        }

        read = {column for name, column in columns.items() if self.has_component(name)}
        if self.has_component("gkd") and self.gkd_lambda < 1:
            read.add("demonstration")
        return super().needs | read | ({"data_source"} if self.sources else set())

    @property
    def always(self) -> frozenset[str]:
        """Return those of every policy, and what a teacher is compared with."""
        compared = self.has_component("teacher") and self.behaviour is Behaviour.RECOMPUTED
        return super().always | ({"old_logprobs"} if compared else set())


@dataclass
class GRPOConfig(GroupConfig):
    """Configure GRPO with the defaults of arXiv 2402.03300.

    That paper states no clip range: 0.2 is PPO's (arXiv 1707.06347).
    """

    name: str = "grpo"
    """The algorithm's name, chosen by algorithm=NAME."""
    aggregation: Aggregation = Aggregation.SEQUENCE_MEAN_TOKEN_MEAN
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: KL = KL.IN_LOSS
    kl_coef: float = 0.04
    baseline: Baseline = Baseline.MEAN
    """What is subtracted from a reward: the group's mean, that mean weighted by sampled
    tokens, the second best reward from the best alone, that of a greedy episode, one
    for each position by the gradients of all samples up to it, the moving mean of the
    row's data_source, or nothing."""
    baseline_decay: float = 0.95
    """What baseline=moving_mean keeps of a mean at each trajectory."""
    scale_by_std: bool = True
    """Divide advantages by the standard deviation of the group's rewards."""
    scale_by_mean: bool = False
    """Divide advantages by the mean of the group's rewards, which must not be negative.
    """
    scale_by_informative: bool = False
    """Multiply advantages by all samples / samples of groups whose rewards differ."""
    by_part: bool = False
    """Compare each part of a reward in its group, and add up the advantages."""
    part_weights: dict[str, float] = field(default_factory=dict)
    """The weight of each part of a reward under by_part, by its name. Others have 1."""
    whiten: bool = False
    """Shift and scale the advantages of a batch to mean 0 and standard deviation 1."""
    anchor_coef: float = 0.0
    """The weight of the advantages of turns, which are compared with the turns of the
    prompt's samples that were shown the same. 0 compares none."""
    anchor_gamma: float = 0.95
    """The discount of rewards per turn under anchor_coef. 1 discounts nothing."""

    @property
    def compares(self) -> bool:
        """Return whether a sample needs another one of its prompt."""
        scales = self.scale_by_std or self.scale_by_mean or self.scale_by_informative
        return super().compares and (self.baseline.compares or scales)

    @property
    def needs(self) -> frozenset[str]:
        """Return the columns of every policy, and those of baseline and anchors."""
        greedy = {"greedy_reward"} if self.baseline is Baseline.GREEDY else set()
        by_token = self.baseline is Baseline.OPTIMAL_TOKEN
        squares = {"sum_pi_squared", "turn"} if by_token else set()
        moving = self.baseline is Baseline.MOVING_MEAN
        source = {"data_source"} if moving else set()
        anchors = {"anchor", "turn"} if self.anchor_coef else set()
        return super().needs | greedy | squares | source | anchors

    @property
    def always(self) -> frozenset[str]:
        """Return those of every policy, and log-probs for squared gradients."""
        by_token = self.baseline is Baseline.OPTIMAL_TOKEN
        return super().always | ({"old_logprobs"} if by_token else set())


@dataclass
class RLOOConfig(GroupConfig):
    """Configure RLOO as in arXiv 2402.14740.

    It has log-probs of sequences, KL in the reward, and no clipping. The KL coefficient
    is our choice.
    """

    name: str = "rloo"
    """The algorithm's name, chosen by algorithm=NAME."""
    aggregation: Aggregation = Aggregation.SEQUENCE_MEAN_TOKEN_SUM
    ratio: Ratio = Ratio.SEQUENCE
    correction_ratio: Ratio = Ratio.SEQUENCE
    kl: KL = KL.IN_REWARD
    kl_coef: float = 0.05
    kl_estimator: KLEstimator = KLEstimator.K1


@dataclass
class PPOConfig(PolicyConfig):
    """Configure PPO.

    Ratio clip, discount and KL coefficient are those of arXiv 2203.02155. ``lam`` and
    the value clip are those of the code of arXiv 1909.08593.
    """

    name: str = "ppo"
    """The algorithm's name, chosen by algorithm=NAME."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: KL = KL.IN_REWARD
    kl_coef: float = 0.02
    kl_estimator: KLEstimator = KLEstimator.K1
    gamma: float = 1.0
    """The discount of rewards per sampled token. 1 discounts nothing."""
    lam: float = 0.95
    """The lambda of GAE. 1 takes returns minus values, without bias, and 0 takes one
    step, with the least variance.
    """
    whiten: bool = True
    """Shift and scale the advantages of a batch to mean 0 and standard deviation 1."""
    value_clip: float = 0.2
    """The critic's loss stops pulling a value that moved farther than this from its old
    one. 0 does not clip values.
    """

    @property
    def needs(self) -> frozenset[str]:
        """Return the columns of every policy, and values."""
        return super().needs | {"values"}


@dataclass
class SFTConfig:
    """Configure supervised fine-tuning."""

    name: str = "sft"
    """The algorithm's name, chosen by algorithm=NAME."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """How the losses of tokens add up to the loss of a step."""
    aggregation_constant: int = 0
    """The divisor of each row's loss under aggregation=constant, in tokens."""
