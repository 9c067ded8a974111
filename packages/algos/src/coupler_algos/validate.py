"""Find problems of a composed configuration before any device is taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from coupler.interfaces import Aggregation
from coupler_algos.adaptive import MAX_ERROR
from coupler_algos.config import (
    KL,
    Behaviour,
    Correction,
    GroupConfig,
    GRPOConfig,
    KLEstimator,
    PolicyConfig,
    PPOConfig,
    Ratio,
    SFTConfig,
    Shape,
)

if TYPE_CHECKING:
    from coupler import RunConfig


def problems(config: RunConfig) -> Iterator[str]:
    """Yield one sentence per problem, with key and fix.

    Algorithms of other plugins have none.
    """
    algorithm = config.algorithm
    if isinstance(algorithm, SFTConfig):
        yield from _constant(algorithm, "the tokens of the longest answer, for example 1024")
    if not isinstance(algorithm, PolicyConfig):
        return

    if isinstance(algorithm, GroupConfig) and config.samples_per_prompt < 2:
        yield (
            f"samples_per_prompt={config.samples_per_prompt} leaves nothing to compare a "
            "sample with: set samples_per_prompt=2 or more."
        )

    yield from _sampling(config, algorithm)
    yield from _constant(
        algorithm, "the longest completion, algorithm.aggregation_constant=${sampling.max_tokens}"
    )
    yield from _ratio(algorithm)
    yield from _shape(algorithm)
    yield from _correction(algorithm)
    yield from _kl(algorithm)
    yield from _horizon(config, algorithm)
    yield from _overlong(config, algorithm)
    if isinstance(algorithm, PPOConfig):
        yield from _returns(algorithm)


def _sampling(config: RunConfig, a: PolicyConfig) -> Iterator[str]:
    if config.max_staleness > 0 and a.behaviour is Behaviour.RECOMPUTED and not a.correction_cap:
        yield (
            f"max_staleness={config.max_staleness} trains on tokens that older weights "
            "sampled, but algorithm.behaviour=recomputed takes newer ones for the ratio's "
            "denominator: set algorithm.behaviour=rollout, or algorithm.correction_cap=2 to "
            "weigh the difference."
        )


def _constant(a: PolicyConfig | SFTConfig, longest: str) -> Iterator[str]:
    if a.aggregation is Aggregation.CONSTANT and a.aggregation_constant < 1:
        yield (
            "algorithm.aggregation=constant cannot divide by algorithm.aggregation_constant="
            f"{a.aggregation_constant}: set it to {longest}."
        )

    if a.aggregation_constant and a.aggregation is not Aggregation.CONSTANT:
        yield (
            f"algorithm.aggregation_constant={a.aggregation_constant} is the divisor of "
            "algorithm.aggregation=constant and does nothing with "
            f"{a.aggregation}: set one of them back."
        )


def _ratio(a: PolicyConfig) -> Iterator[str]:
    if not 0 <= a.clip_low < 1:
        yield (
            f"algorithm.clip_low={a.clip_low} must be at least 0 (off) and below 1, since a "
            "ratio is positive."
        )

    if a.clip_high < 0:
        yield f"algorithm.clip_high={a.clip_high} must not be negative: 0 switches it off."

    if a.dual_clip != 0 and a.dual_clip <= 1:
        yield (
            f"algorithm.dual_clip={a.dual_clip} must be above 1 (3 is usual), or 0 to "
            "switch it off."
        )


def _shape(a: PolicyConfig) -> Iterator[str]:
    if a.dual_clip and a.shape is not Shape.CLIP:
        yield (
            f"algorithm.dual_clip={a.dual_clip} belongs to algorithm.shape=clip and does nothing "
            f"with {a.shape}: set one of them back."
        )

    if a.shape is Shape.GATE and (a.clip_low or a.clip_high):
        yield (
            f"algorithm.shape=gate does not clip: set algorithm.clip_low={a.clip_low} and "
            f"algorithm.clip_high={a.clip_high} to 0."
        )

    for key in ("gate_positive", "gate_negative"):
        if getattr(a, key) <= 0:
            yield f"algorithm.{key}={getattr(a, key)} must be above 0; 1 is usual."

    if a.ratio is Ratio.SEQUENCE and isinstance(a, PPOConfig):
        yield (
            "algorithm.ratio=sequence needs one advantage for all tokens of a sequence, and "
            "algorithm=ppo has one for each: set algorithm.ratio=token or geometric."
        )

    if isinstance(a, GRPOConfig) and a.scale_by_std and a.scale_by_mean:
        yield (
            "algorithm.scale_by_std and algorithm.scale_by_mean divide the same advantages: set "
            "one of them to false."
        )

    if a.opsm_delta < 0:
        yield f"algorithm.opsm_delta={a.opsm_delta} must not be negative: 0 switches it off."


def _correction(a: PolicyConfig) -> Iterator[str]:
    if a.correction_cap < 0:
        yield (
            f"algorithm.correction_cap={a.correction_cap} must not be negative: 0 switches "
            "the correction off."
        )

    if a.correction_cap > 0 and a.behaviour is Behaviour.ROLLOUT:
        yield (
            "algorithm.correction_cap corrects from recomputed to rollout log-probs and does "
            "nothing with algorithm.behaviour=rollout: set one of them back."
        )

    masks = a.correction is Correction.MASK
    if masks and not a.correction_cap:
        yield (
            "algorithm.correction=mask needs the largest weight that it keeps: set "
            "algorithm.correction_cap=5."
        )

    if a.correction_floor and not masks:
        yield (
            f"algorithm.correction_floor={a.correction_floor} belongs to "
            "algorithm.correction=mask: set one of them back."
        )

    if masks and a.correction_cap and not 0 <= a.correction_floor < a.correction_cap:
        yield (
            f"algorithm.correction_floor={a.correction_floor} must be at least 0 and below "
            f"algorithm.correction_cap={a.correction_cap}."
        )


def _kl(a: PolicyConfig) -> Iterator[str]:
    if a.kl is not KL.NONE and a.kl_coef <= 0:
        yield (
            f"algorithm.kl={a.kl} with algorithm.kl_coef={a.kl_coef} computes reference "
            "log-probs for nothing: set algorithm.kl_coef above 0, or algorithm.kl=none."
        )

    if a.kl_target < 0:
        yield (
            f"algorithm.kl_target={a.kl_target} must not be negative: 0 keeps "
            "algorithm.kl_coef as it is."
        )

    if a.kl_target > 0 and a.kl is KL.NONE:
        yield (
            f"algorithm.kl_target={a.kl_target} adapts a coefficient that algorithm.kl=none "
            "does not use: set algorithm.kl=in_reward or in_loss."
        )

    if a.kl is KL.IN_LOSS and a.kl_estimator is KLEstimator.K1:
        yield (
            "algorithm.kl_estimator=k1 has a gradient of zero expectation in the loss: "
            "set algorithm.kl_estimator=k2 or k3, or algorithm.kl=in_reward."
        )


def _horizon(config: RunConfig, a: PolicyConfig) -> Iterator[str]:
    trajectories = config.prompts_per_step * config.samples_per_prompt
    if a.kl_horizon < 1:
        yield f"algorithm.kl_horizon={a.kl_horizon} must be at least 1 trajectory; 10000 is usual."
    elif a.kl_target > 0 and MAX_ERROR * trajectories >= a.kl_horizon:
        yield (
            f"algorithm.kl_horizon={a.kl_horizon} is so short that the {trajectories} "
            "trajectories of a step could take algorithm.kl_coef to 0 or below: set "
            f"algorithm.kl_horizon={trajectories} or more; 10000 is usual."
        )


def _overlong(config: RunConfig, a: PolicyConfig) -> Iterator[str]:
    buffer, longest = a.overlong_buffer_tokens, config.sampling.max_tokens
    if buffer < 0:
        yield f"algorithm.overlong_buffer_tokens={buffer} must not be negative: 0 switches it off."

    if buffer > 0 and a.overlong_max_tokens < 1:
        yield (
            f"algorithm.overlong_buffer_tokens={buffer} needs the longest completion: "
            "set algorithm.overlong_max_tokens=${sampling.max_tokens}."
        )

    if 0 < buffer < longest <= a.overlong_max_tokens - buffer:
        yield (
            f"algorithm.overlong_max_tokens={a.overlong_max_tokens} punishes no completion of "
            f"at most sampling.max_tokens={longest}: set it to ${{sampling.max_tokens}}."
        )

    if buffer >= longest:
        yield (
            f"algorithm.overlong_buffer_tokens={buffer} punishes every completion of at most "
            f"sampling.max_tokens={longest}: set it to a fifth, {longest // 5}."
        )


def _returns(a: PPOConfig) -> Iterator[str]:
    for key in ("gamma", "lam"):
        if not 0 <= getattr(a, key) <= 1:
            yield f"algorithm.{key}={getattr(a, key)} must be between 0 and 1."
    if a.value_clip < 0:
        yield f"algorithm.value_clip={a.value_clip} must not be negative: 0 switches it off."
