"""Define what users set under ``algorithm``.

This module imports nothing heavy: core reads it before a backend is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from coupler.interfaces import Aggregation


class KL(StrEnum):
    """Name the place where the divergence from the reference policy enters."""

    NONE = "none"
    IN_REWARD = "in_reward"
    IN_LOSS = "in_loss"


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


class Ratio(StrEnum):
    """Choose what one ratio of probabilities is of."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    """The product over the tokens that a trajectory sampled, in all of its rows."""
    GEOMETRIC = "geometric"
    """The geometric mean over them: GSPO (arXiv 2507.18071) eq. 7."""


class Shape(StrEnum):
    """Choose how ratio and advantage become a loss.

    :mod:`coupler_algos.shapes` has each.
    """

    CLIP = "clip"
    """PPO's: arXiv 1707.06347 eq. 7."""
    DETACHED_CLIP = "detached_clip"
    """CISPO's: arXiv 2506.13585 eq. 4."""
    GATE = "gate"
    """SAPO's: arXiv 2511.20347."""


class Correction(StrEnum):
    """Choose what becomes of a weight w = recomputed / rollout probability."""

    TRUNCATE = "truncate"
    """min(w, cap): arXiv 1802.01561."""
    MASK = "mask"
    """w between floor and cap, and 0 outside: IcePop (arXiv 2510.18855)."""


class Baseline(StrEnum):
    """Choose what GRPO subtracts from a reward."""

    MEAN = "mean"
    """The mean of the prompt's group."""
    LENGTH_WEIGHTED = "length_weighted"
    """The mean of the group, weighted by sampled tokens: OPO (arXiv 2505.23585)."""


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
    """How ratio and advantage become a loss: clip, detached_clip or gate."""
    clip_low: float = 0.0
    """The ratio is clipped below at 1 - clip_low. 0 does not clip it there."""
    clip_high: float = 0.0
    """The ratio is clipped above at 1 + clip_high. 0 does not clip it there."""
    dual_clip: float = 0.0
    """Bound the loss of a negative advantage at -advantage * dual_clip. It must be
    above 1, or 0 for no bound.
    """
    gate_positive: float = 1.0
    """The steepness of shape=gate where the advantage is positive."""
    gate_negative: float = 1.05
    """The steepness of shape=gate where the advantage is negative."""
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
    opsm_delta: float = 0.0
    """Drop a sequence with a negative advantage whose mean log-prob fell by more than
    this many nats since it was sampled. 0 drops none.
    """
    kl: KL = KL.NONE
    """Where the divergence from the reference enters: in the reward, in the loss, or
    nowhere."""
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
        return frozenset(reference | old | self.always)

    @property
    def reads_sequences(self) -> bool:
        """Return whether a loss reads all tokens that its trajectory sampled
        (``Algorithm.whole_units``).
        """
        weighs = self.correction_cap > 0 and self.correction_ratio is not Ratio.TOKEN
        return self.ratio is not Ratio.TOKEN or weighs or self.opsm_delta > 0

    @property
    def always(self) -> frozenset[str]:
        """Return the columns that KL reads before training (``Algorithm.always``).

        The policy's log-probs come from the trainer, as the reference's do. Those of
        the rollout differ by rounding, which would count as divergence.
        """
        reads = self.kl is KL.IN_REWARD or self.kl_target > 0
        return frozenset({"old_logprobs"} if reads else ())


@dataclass
class GroupConfig(PolicyConfig):
    """Hold what GRPO and RLOO share: they compare the samples of one prompt."""

    dynamic_sampling: bool = False
    """Sample another group in place of one whose rewards are all equal."""


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
    """What is subtracted from a reward: the group's mean, or that mean weighted by
    sampled tokens."""
    scale_by_std: bool = True
    """Divide advantages by the standard deviation of the group's rewards."""
    scale_by_mean: bool = False
    """Divide advantages by the mean of the group's rewards, which must not be negative.
    """
    whiten: bool = False
    """Shift and scale the advantages of a batch to mean 0 and standard deviation 1."""


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
