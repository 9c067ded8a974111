"""What users set under ``algorithm``. Imports nothing heavy: core reads it before a backend is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from coupler.interfaces import Aggregation


class KL(StrEnum):
    """Where the divergence from the reference policy enters."""

    NONE = "none"
    IN_REWARD = "in_reward"
    IN_LOSS = "in_loss"


class KLEstimator(StrEnum):
    """How the divergence of a token is estimated: see :mod:`coupler_algos.kl`, for value and gradient."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class Behaviour(StrEnum):
    """Whose log-probs are the denominator of the ratio."""

    RECOMPUTED = "recomputed"  # the engine's, with the weights from before the batch's first optimizer step
    ROLLOUT = "rollout"  # those that the rollout reported when it sampled


@dataclass
class PolicyConfig:
    """What GRPO, RLOO and PPO share. In every number, 0 switches the part off."""

    aggregation: Aggregation = Aggregation.TOKEN_MEAN  # how the losses of tokens add up
    aggregation_constant: int = 0  # tokens; the divisor per sequence under aggregation=constant
    clip_low: float = 0.0  # the ratio is clipped below at 1 - clip_low
    clip_high: float = 0.0  # and above at 1 + clip_high
    dual_clip: float = 0.0  # above 1: bounds the loss of a negative advantage at -advantage * dual_clip
    behaviour: Behaviour = Behaviour.RECOMPUTED
    correction_cap: float = 0.0  # weighs the loss with min(recomputed / rollout probability, cap)
    kl: KL = KL.NONE
    kl_coef: float = 0.0  # weight of the divergence; 0 switches it off
    kl_target: float = 0.0  # nats per trajectory; above 0 kl_coef is where the coefficient starts that follows it
    kl_horizon: int = 10_000  # trajectories over which the coefficient follows; larger is slower
    kl_estimator: KLEstimator = KLEstimator.K3
    entropy_coef: float = 0.0  # bonus
    log_entropy: bool = True  # compute the entropy for the log, without gradient, where there is no bonus
    overlong_buffer_tokens: int = 0  # completions lose up to 1 reward over the last so many tokens
    overlong_max_tokens: int = 0  # the length at which it is 1: ${sampling.max_tokens}

    @property
    def needs(self) -> frozenset[str]:
        """The columns that core adds under this configuration: ``Algorithm.needs``."""
        reference = {"ref_logprobs"} if self.kl is not KL.NONE else set()
        old = {"old_logprobs"} if self.behaviour is Behaviour.RECOMPUTED else set()
        return frozenset(reference | old | self.always)

    @property
    def always(self) -> frozenset[str]:
        """The columns that KL reads before training: ``Algorithm.always``.

        The policy's log-probs come from the trainer, as the reference's do. Those of the
        rollout differ by rounding, which would count as divergence.
        """
        reads = self.kl is KL.IN_REWARD or self.kl_target > 0
        return frozenset({"old_logprobs"} if reads else ())


@dataclass
class GroupConfig(PolicyConfig):
    """What GRPO and RLOO share: they compare the samples of one prompt."""

    dynamic_sampling: bool = False  # ask for another group where all rewards of one are equal


@dataclass
class GRPOConfig(GroupConfig):
    """Defaults of arXiv 2402.03300; it states no clip range, 0.2 is PPO's (arXiv 1707.06347)."""

    name: str = "grpo"  # chosen by algorithm=NAME
    aggregation: Aggregation = Aggregation.SEQUENCE_MEAN_TOKEN_MEAN
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: KL = KL.IN_LOSS
    kl_coef: float = 0.04
    scale_by_std: bool = True  # divide by the standard deviation of the group's rewards


@dataclass
class RLOOConfig(GroupConfig):
    """As in arXiv 2402.14740: sequence log-probs, KL in the reward, no clipping. The KL coefficient is our choice."""

    name: str = "rloo"  # chosen by algorithm=NAME
    aggregation: Aggregation = Aggregation.SEQUENCE_MEAN_TOKEN_SUM
    kl: KL = KL.IN_REWARD
    kl_coef: float = 0.05
    kl_estimator: KLEstimator = KLEstimator.K1


@dataclass
class PPOConfig(PolicyConfig):
    """Ratio clip, discount and KL coefficient of arXiv 2203.02155, lam and value clip of the code of 1909.08593."""

    name: str = "ppo"  # chosen by algorithm=NAME
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: KL = KL.IN_REWARD
    kl_coef: float = 0.02
    kl_estimator: KLEstimator = KLEstimator.K1
    gamma: float = 1.0  # discount per sampled token
    lam: float = 0.95  # 1: returns minus values, unbiased; 0: one step, the least variance
    whiten: bool = True  # advantages of the batch to mean 0 and standard deviation 1
    value_clip: float = 0.2  # values may move so far from the old ones before their loss stops pulling

    @property
    def needs(self) -> frozenset[str]:
        """What every policy needs, and values."""
        return super().needs | {"values"}


@dataclass
class SFTConfig:
    name: str = "sft"  # chosen by algorithm=NAME
    aggregation: Aggregation = Aggregation.TOKEN_MEAN  # how the losses of tokens add up
    aggregation_constant: int = 0  # tokens; the divisor per sequence under aggregation=constant
