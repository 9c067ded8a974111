"""Find problems of a composed configuration before any device is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from coupler.interfaces import Aggregation
from coupler_algos.adaptive import MAX_ERROR
from coupler_algos.config import (
    KL,
    REWARDED,
    Behaviour,
    GroupConfig,
    GRPOConfig,
    KLEstimator,
    PolicyConfig,
    PPOConfig,
    SFTConfig,
)
from coupler_algos.slots import REJECTIONS, Baseline, Correction, Ratio, Shape

if TYPE_CHECKING:
    from coupler import RunConfig

# When a rule finds a problem, and the sentence about it. Its {a.KEY} are options.
Rule = tuple[Callable[[Any], bool], str]

AGGREGATION: tuple[Rule, ...] = (
    (
        lambda a: a.aggregation_constant and a.aggregation is not Aggregation.CONSTANT,
        "algorithm.aggregation_constant={a.aggregation_constant} is the divisor of "
        "algorithm.aggregation=constant and does nothing with {a.aggregation}: set one of them "
        "back.",
    ),
)

POLICY: tuple[Rule, ...] = (
    # --- ratio and shape
    (
        lambda a: not 0 <= a.clip_low < 1,
        "algorithm.clip_low={a.clip_low} must be at least 0 (off) and below 1, since a ratio is "
        "positive.",
    ),
    (
        lambda a: a.clip_high < 0,
        "algorithm.clip_high={a.clip_high} must not be negative: 0 switches it off.",
    ),
    (
        lambda a: a.dual_clip != 0 and a.dual_clip <= 1,
        "algorithm.dual_clip={a.dual_clip} must be above 1 (3 is usual), or 0 to switch it off.",
    ),
    (
        lambda a: a.dual_clip and a.shape is not Shape.CLIP,
        "algorithm.dual_clip={a.dual_clip} belongs to algorithm.shape=clip and does nothing with "
        "{a.shape}: set one of them back.",
    ),
    (
        lambda a: not a.shape.clips and (a.clip_low or a.clip_high),
        "algorithm.shape={a.shape} does not clip: set algorithm.clip_low={a.clip_low} and "
        "algorithm.clip_high={a.clip_high} to 0.",
    ),
    (
        lambda a: a.gate_positive <= 0,
        "algorithm.gate_positive={a.gate_positive} must be above 0; 1 is usual.",
    ),
    (
        lambda a: a.gate_negative <= 0,
        "algorithm.gate_negative={a.gate_negative} must be above 0; 1 is usual.",
    ),
    (
        lambda a: min(a.kernel_power_positive, a.kernel_power_negative) < 0,
        "algorithm.kernel_power_positive={a.kernel_power_positive} and kernel_power_negative="
        "{a.kernel_power_negative} must not be negative: 2 and 3 are usual.",
    ),
    (
        lambda a: min(a.kernel_rate_positive, a.kernel_rate_negative) < 0,
        "algorithm.kernel_rate_positive={a.kernel_rate_positive} and kernel_rate_negative="
        "{a.kernel_rate_negative} must not be negative: 3 and 2 are usual.",
    ),
    (
        lambda a: a.shape is Shape.TV_MASK and a.ratio is not Ratio.TOKEN,
        "algorithm.shape=tv_mask compares probabilities of tokens and has no meaning for "
        "algorithm.ratio={a.ratio}: set algorithm.ratio=token.",
    ),
    (
        lambda a: a.shape is Shape.LIKELIHOOD and a.ratio is not Ratio.TOKEN,
        "algorithm.shape=likelihood has no ratio, and algorithm.ratio={a.ratio} does nothing: set "
        "algorithm.ratio=token.",
    ),
    (
        lambda a: a.ratio is Ratio.SEQUENCE and isinstance(a, PPOConfig),
        "algorithm.ratio=sequence needs one advantage for all tokens of a sequence, and "
        "algorithm=ppo has one for each: set algorithm.ratio=token or geometric.",
    ),
    (
        lambda a: a.ratio is Ratio.SEQUENCE and a.kl is KL.IN_RETURN,
        "algorithm.ratio=sequence needs one advantage for all tokens of a sequence, and "
        "algorithm.kl=in_return gives one to each: set algorithm.kl=in_reward.",
    ),
    # --- tokens that are dropped, weighed or held
    (
        lambda a: a.opsm_delta < 0,
        "algorithm.opsm_delta={a.opsm_delta} must not be negative: 0 switches it off.",
    ),
    (
        lambda a: a.second_moment < 0,
        "algorithm.second_moment={a.second_moment} must not be negative: 0 switches it off, and "
        "0.04 is usual.",
    ),
    (
        lambda a: not 0 <= a.covariance_share < 1,
        "algorithm.covariance_share={a.covariance_share} is a share of tokens: set it from 0 (off) "
        "to below 1; 0.002 is usual.",
    ),
    (
        lambda a: (
            not a.covariance_share and (a.covariance_kl or a.covariance_low or a.covariance_high)
        ),
        "algorithm.covariance_kl, covariance_low and covariance_high are of marked tokens, and "
        "algorithm.covariance_share=0 marks none: set it to 0.002.",
    ),
    (
        lambda a: a.covariance_low and a.covariance_high and a.covariance_low >= a.covariance_high,
        "algorithm.covariance_low={a.covariance_low} must be below "
        "algorithm.covariance_high={a.covariance_high}.",
    ),
    (
        lambda a: a.covariance_kl < 0,
        "algorithm.covariance_kl={a.covariance_kl} must not be negative: 0 drops the gradient of "
        "marked tokens.",
    ),
    (
        lambda a: a.proximal_coef < 0,
        "algorithm.proximal_coef={a.proximal_coef} must not be negative: 0 switches it off.",
    ),
    # --- corrections
    (
        lambda a: a.correction_cap < 0,
        "algorithm.correction_cap={a.correction_cap} must not be negative: 0 switches the "
        "correction off.",
    ),
    (
        lambda a: a.correction_cap > 0 and a.behaviour is Behaviour.ROLLOUT,
        "algorithm.correction_cap corrects from recomputed to rollout log-probs and does nothing "
        "with algorithm.behaviour=rollout: set one of them back.",
    ),
    (
        lambda a: a.correction is Correction.MASK and not a.correction_cap,
        "algorithm.correction=mask needs the largest weight that it keeps: set "
        "algorithm.correction_cap=5.",
    ),
    (
        lambda a: a.correction_floor and a.correction is not Correction.MASK,
        "algorithm.correction_floor={a.correction_floor} belongs to algorithm.correction=mask: set "
        "one of them back.",
    ),
    (
        lambda a: (
            a.correction is Correction.MASK
            and a.correction_cap
            and not 0 <= a.correction_floor < a.correction_cap
        ),
        "algorithm.correction_floor={a.correction_floor} must be at least 0 and below "
        "algorithm.correction_cap={a.correction_cap}.",
    ),
    (
        lambda a: a.correction_normalize and not a.correction_cap,
        "algorithm.correction_normalize divides the weights of algorithm.correction_cap, which is "
        "0: set it to 2.",
    ),
    # --- the teacher
    (
        lambda a: a.teacher_coef < 0,
        "algorithm.teacher_coef={a.teacher_coef} must not be negative: 0 asks no teacher.",
    ),
    (
        lambda a: a.reward_coef < 0,
        "algorithm.reward_coef={a.reward_coef} must not be negative: 0 learns from the teacher "
        "alone.",
    ),
    (
        lambda a: a.reward_coef != 1 and not a.teacher_coef,
        "algorithm.reward_coef={a.reward_coef} weighs rewards against a teacher, and "
        "algorithm.teacher_coef=0 asks none: set one of them to 1.",
    ),
    (
        lambda a: a.teacher_coef and a.ratio is Ratio.SEQUENCE,
        "algorithm.ratio=sequence needs one advantage for all tokens of a sequence, and a teacher "
        "has one for each: set algorithm.ratio=token or geometric.",
    ),
    (
        lambda a: not a.reward_coef and a.kl in REWARDED,
        "algorithm.kl={a.kl} changes rewards, and algorithm.reward_coef=0 learns nothing from "
        "them: set algorithm.kl=in_loss or none.",
    ),
    # --- divergence from the reference
    (
        lambda a: a.kl is not KL.NONE and a.kl_coef <= 0,
        "algorithm.kl={a.kl} with algorithm.kl_coef={a.kl_coef} computes reference log-probs for "
        "nothing: set algorithm.kl_coef above 0, or algorithm.kl=none.",
    ),
    (
        lambda a: a.kl_target < 0,
        "algorithm.kl_target={a.kl_target} must not be negative: 0 keeps algorithm.kl_coef as it "
        "is.",
    ),
    (
        lambda a: a.kl_target > 0 and a.kl is KL.NONE,
        "algorithm.kl_target={a.kl_target} adapts a coefficient that algorithm.kl=none does not "
        "use: set algorithm.kl=in_reward or in_loss.",
    ),
    (
        lambda a: a.kl is KL.IN_LOSS and a.kl_estimator is KLEstimator.K1,
        "algorithm.kl_estimator=k1 has a gradient of zero expectation in the loss: set "
        "algorithm.kl_estimator=k2 or k3, or algorithm.kl=in_reward.",
    ),
    (
        lambda a: a.kl is KL.IN_RETURN and isinstance(a, PPOConfig),
        "algorithm.kl=in_return is of algorithm=grpo; in ppo every token has its own reward: set "
        "algorithm.kl=in_reward.",
    ),
)

GRPO: tuple[Rule, ...] = (
    (
        lambda a: a.scale_by_std and a.scale_by_mean,
        "algorithm.scale_by_std and algorithm.scale_by_mean divide the same advantages: set one of "
        "them to false.",
    ),
    (
        lambda a: not a.baseline.compares and a.scale_by_informative,
        "algorithm.scale_by_informative counts samples that their group tells nothing of, and "
        "algorithm.baseline={a.baseline} asks no group: set one of them back.",
    ),
    (
        lambda a: (
            a.ratio is Ratio.SEQUENCE and (a.anchor_coef or a.baseline is Baseline.OPTIMAL_TOKEN)
        ),
        "algorithm.ratio=sequence needs one advantage for all tokens of a sequence, and "
        "algorithm.anchor_coef and algorithm.baseline=optimal_token give others to each: set "
        "algorithm.ratio=token or geometric.",
    ),
    (
        lambda a: a.baseline is Baseline.OPTIMAL_TOKEN and (a.by_part or a.anchor_coef),
        "algorithm.baseline=optimal_token compares the whole reward at each position: set "
        "algorithm.by_part to false and algorithm.anchor_coef to 0.",
    ),
    (
        lambda a: a.anchor_coef < 0,
        "algorithm.anchor_coef={a.anchor_coef} must not be negative: 0 compares no turns.",
    ),
    (
        lambda a: not 0 <= a.anchor_gamma <= 1,
        "algorithm.anchor_gamma={a.anchor_gamma} must be between 0 and 1; 0.95 is usual.",
    ),
    (
        lambda a: a.baseline is Baseline.GREEDY and (a.by_part or a.scale_by_mean),
        "algorithm.baseline=greedy compares the whole reward with that of a greedy episode: set "
        "algorithm.by_part and algorithm.scale_by_mean to false.",
    ),
    (
        lambda a: (
            a.baseline is Baseline.MOVING_MEAN
            and any(
                (
                    a.by_part,
                    a.scale_by_mean,
                    a.scale_by_std,
                    a.kl_target,
                )
            )
        ),
        "algorithm.baseline=moving_mean compares the whole reward with those of other prompts: set "
        "algorithm.by_part, algorithm.scale_by_mean and algorithm.scale_by_std to false, and "
        "algorithm.kl_target to 0.",
    ),
    (
        lambda a: not 0 <= a.baseline_decay < 1,
        "algorithm.baseline_decay={a.baseline_decay} must be from 0 to below 1; 0.95 is usual.",
    ),
    (
        lambda a: a.part_weights and not a.by_part,
        "algorithm.part_weights weighs the parts that algorithm.by_part compares: set "
        "algorithm.by_part=true.",
    ),
    (
        lambda a: a.by_part and (a.overlong_buffer_tokens or a.kl is KL.IN_REWARD),
        "algorithm.by_part compares the parts of a reward, which algorithm.overlong_buffer_tokens "
        "and algorithm.kl=in_reward do not change: set them to 0 and in_loss.",
    ),
)

PPO: tuple[Rule, ...] = (
    (
        lambda a: not a.reward_coef,
        "algorithm.reward_coef=0 leaves the critic of algorithm=ppo no returns to learn: set "
        "algorithm=opd, which has no critic.",
    ),
    (
        lambda a: not 0 <= a.gamma <= 1,
        "algorithm.gamma={a.gamma} must be between 0 and 1.",
    ),
    (lambda a: not 0 <= a.lam <= 1, "algorithm.lam={a.lam} must be between 0 and 1."),
    (
        lambda a: a.value_clip < 0,
        "algorithm.value_clip={a.value_clip} must not be negative: 0 switches it off.",
    ),
)

RULES = {
    (SFTConfig, PolicyConfig): AGGREGATION,
    PolicyConfig: POLICY,
    GRPOConfig: GRPO,
    PPOConfig: PPO,
}


def problems(config: RunConfig) -> Iterator[str]:
    """Yield one sentence per problem, with key and fix.

    Algorithms of other plugins have none.
    """
    algorithm = config.algorithm
    for kind, rules in RULES.items():
        if isinstance(algorithm, kind):
            yield from (say.format(a=algorithm) for found, say in rules if found(algorithm))

    if isinstance(algorithm, SFTConfig):
        yield from _constant(algorithm, "the tokens of the longest answer, for example 1024")
    if not isinstance(algorithm, PolicyConfig):
        return
    yield from _constant(
        algorithm, "the longest completion, algorithm.aggregation_constant=${sampling.max_tokens}"
    )
    yield from _sampling(config, algorithm)
    yield from _rejections(algorithm)
    yield from _horizon(config, algorithm)
    yield from _overlong(config, algorithm)


def _constant(a: PolicyConfig | SFTConfig, longest: str) -> Iterator[str]:
    if a.aggregation is Aggregation.CONSTANT and a.aggregation_constant < 1:
        yield (
            "algorithm.aggregation=constant cannot divide by algorithm.aggregation_constant="
            f"{a.aggregation_constant}: set it to {longest}."
        )


def _sampling(config: RunConfig, a: PolicyConfig) -> Iterator[str]:
    if isinstance(a, GRPOConfig) and a.anchor_coef and config.environment is None:
        yield (
            f"algorithm.anchor_coef={a.anchor_coef} compares turns that were shown the same, and "
            "without an environment each sample has one turn: set environment, or "
            "algorithm.anchor_coef=0."
        )
    compares = isinstance(a, GroupConfig) and a.compares
    if compares and config.samples_per_prompt < 2:
        yield (
            f"samples_per_prompt={config.samples_per_prompt} leaves nothing to compare a "
            "sample with: set samples_per_prompt=2 or more."
        )

    if config.max_staleness > 0 and a.behaviour is Behaviour.RECOMPUTED and not a.correction_cap:
        yield (
            f"max_staleness={config.max_staleness} trains on tokens that older weights "
            "sampled, but algorithm.behaviour=recomputed takes newer ones for the ratio's "
            "denominator: set algorithm.behaviour=rollout, or algorithm.correction_cap=2 to "
            "weigh the difference."
        )


def _rejections(a: PolicyConfig) -> Iterator[str]:
    for key, bound in a.reject.items():
        if key not in REJECTIONS:
            yield f"algorithm.reject.{key} is unknown: set one of {', '.join(REJECTIONS)}."
        elif bound <= 0:
            yield (
                f"algorithm.reject.{key}={bound} drops every token: set a bound above 0, in nats, "
                "or leave it out."
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
