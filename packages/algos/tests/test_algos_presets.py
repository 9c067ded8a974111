"""Presets, composed the way ``coupler train`` composes them."""

from __future__ import annotations

from math import exp

import pytest

from coupler.config.compose import Composed, compose
from coupler.config.schema import Job
from coupler.errors import ConfigError
from coupler.interfaces import Aggregation
from coupler.plugins.manager import Plugins
from coupler_algos.config import KL, Behaviour, GRPOConfig, KLEstimator
from coupler_algos.slots import Baseline, Ratio, Shape


def composed(*overrides: str) -> Composed:
    required = ["engine=toy", "rollout=toy", "model.path=m", "data.source=d", "reward.target=a:b"]
    return compose(Plugins.load(), [*required, *overrides], job=Job.TRAIN)


def test_dapo_is_grpo_with_the_papers_switches():
    algorithm = composed("algorithm=dapo", "sampling.max_tokens=20480").config.algorithm
    assert algorithm == GRPOConfig(
        aggregation=Aggregation.TOKEN_MEAN,
        clip_high=0.28,
        kl=KL.NONE,
        overlong_buffer_tokens=4096,
        overlong_max_tokens=20480,
        dynamic_sampling=True,
    )


def test_dapo_says_what_to_do_about_short_completions():
    with pytest.raises(ConfigError, match="set it to a fifth, 51"):
        composed("algorithm=dapo", "sampling.max_tokens=256")
    assert composed(
        "algorithm=dapo", "sampling.max_tokens=256", "algorithm.overlong_buffer_tokens=51"
    )


def test_dr_grpo_divides_by_the_longest_completion_and_by_no_std():
    algorithm = composed("algorithm=dr_grpo", "sampling.max_tokens=512").config.algorithm
    assert algorithm == GRPOConfig(
        aggregation=Aggregation.CONSTANT, aggregation_constant=512, scale_by_std=False, kl=KL.NONE
    )


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gspo", {"ratio": Ratio.GEOMETRIC, "clip_low": 3e-4, "clip_high": 4e-4}),
        (
            "cispo",
            {
                "shape": Shape.DETACHED_CLIP,
                "aggregation": Aggregation.TOKEN_MEAN,
                "clip_low": 0.0,
                "clip_high": 4.0,
            },
        ),
        ("sapo", {"shape": Shape.GATE, "clip_low": 0.0, "clip_high": 0.0}),
        (
            "opo",
            {
                "baseline": Baseline.LENGTH_WEIGHTED,
                "scale_by_std": False,
                "aggregation": Aggregation.SEQUENCE_MEAN_TOKEN_SUM,
                "clip_low": 0.0,
                "clip_high": 0.0,
            },
        ),
        ("maxrl", {"scale_by_std": False, "scale_by_mean": True}),
        (
            "reinforce_plus_plus",
            {
                "baseline": Baseline.NONE,
                "scale_by_std": False,
                "whiten": True,
                "aggregation": Aggregation.TOKEN_MEAN,
                "kl": KL.IN_RETURN,
                "kl_estimator": KLEstimator.K1,
                "kl_coef": 0.001,
            },
        ),
        (
            "clip_cov",
            {
                "aggregation": Aggregation.TOKEN_MEAN,
                "covariance_share": 0.0002,
                "covariance_low": 1.0,
                "covariance_high": 5.0,
            },
        ),
        (
            "kl_cov",
            {
                "aggregation": Aggregation.TOKEN_MEAN,
                "covariance_share": 0.002,
                "covariance_kl": 1.0,
                "clip_low": 0.0,
                "clip_high": 0.0,
            },
        ),
        (
            "dppo",
            {
                "shape": Shape.TV_MASK,
                "behaviour": Behaviour.ROLLOUT,
                "proximal_coef": 0.001,
                "aggregation": Aggregation.TOKEN_MEAN,
            },
        ),
        (
            "luspo",
            {
                "ratio": Ratio.GEOMETRIC,
                "clip_low": 3e-4,
                "clip_high": 4e-4,
                "aggregation": Aggregation.SEQUENCE_MEAN_TOKEN_SUM,
            },
        ),
        (
            "topr",
            {
                "ratio": Ratio.SEQUENCE,
                "shape": Shape.TAPER,
                "behaviour": Behaviour.ROLLOUT,
                "aggregation": Aggregation.SEQUENCE_MEAN_TOKEN_SUM,
                "scale_by_std": False,
                "clip_low": 0.0,
                "clip_high": 0.0,
            },
        ),
        (
            "vespo",
            {
                "ratio": Ratio.SEQUENCE,
                "shape": Shape.GAMMA_KERNEL,
                "behaviour": Behaviour.ROLLOUT,
                "aggregation": Aggregation.SEQUENCE_MEAN_TOKEN_SUM,
                "clip_low": 0.0,
                "clip_high": 0.0,
            },
        ),
        (
            "m2po",
            {
                "second_moment": 0.04,
                "behaviour": Behaviour.ROLLOUT,
                "aggregation": Aggregation.TOKEN_MEAN,
                "clip_low": 0.0,
                "clip_high": 0.0,
            },
        ),
        (
            "kpop",
            {
                "reject": {"token_binary": 0.1},
                "behaviour": Behaviour.ROLLOUT,
                "aggregation": Aggregation.TOKEN_MEAN,
                "clip_low": 0.0,
                "clip_high": 0.0,
            },
        ),
        (
            "rae",
            {
                "baseline": Baseline.MOVING_MEAN,
                "baseline_decay": 0.95,
                "scale_by_std": False,
                "aggregation": Aggregation.SEQUENCE_MEAN_TOKEN_SUM,
                "clip_low": 0.0,
                "clip_high": 0.0,
            },
        ),
        (
            "dro",
            {
                "shape": Shape.LIKELIHOOD,
                "proximal_coef": 0.025,
                "behaviour": Behaviour.ROLLOUT,
                "aggregation": Aggregation.TOKEN_MEAN,
                "scale_by_std": False,
                "clip_low": 0.0,
                "clip_high": 0.0,
            },
        ),
        (
            "gpg",
            {
                "shape": Shape.LIKELIHOOD,
                "aggregation": Aggregation.TOKEN_MEAN,
                "scale_by_std": False,
                "scale_by_informative": True,
                "clip_low": 0.0,
                "clip_high": 0.0,
            },
        ),
        (
            "otb",
            {
                "baseline": Baseline.OPTIMAL_TOKEN,
                "scale_by_std": False,
                "aggregation": Aggregation.TOKEN_MEAN,
            },
        ),
        ("pass_at_k", {"baseline": Baseline.SECOND_BEST, "scale_by_std": False}),
        ("gdpo", {"by_part": True, "whiten": True}),
        (
            "gmpo",
            {
                "ratio": Ratio.GEOMETRIC,
                "shape": Shape.CLIP_TOKENS,
                "clip_low": 1 - exp(-0.4),
                "clip_high": exp(0.4) - 1,
            },
        ),
        (
            "reinforce_plus_plus_baseline",
            {
                "scale_by_std": False,
                "whiten": True,
                "aggregation": Aggregation.TOKEN_MEAN,
                "kl": KL.IN_LOSS,
                "kl_estimator": KLEstimator.K2,
                "kl_coef": 0.001,
            },
        ),
    ],
)
def test_a_preset_is_grpo_with_these_switches(name: str, changes: dict[str, object]) -> None:
    found = composed(f"algorithm={name}").config.algorithm
    assert found == GRPOConfig(**{"kl": KL.NONE, **changes})


def test_gigpo_is_grpo_that_compares_turns_too():
    algorithm = composed("algorithm=gigpo", "environment=toy").config.algorithm
    assert algorithm == GRPOConfig(anchor_coef=1.0, anchor_gamma=0.95, kl_coef=0.01)
    with pytest.raises(ConfigError, match="without an environment each sample has one turn"):
        composed("algorithm=gigpo")


def test_the_command_line_wins_over_a_preset():
    assert (
        composed("algorithm=dr_grpo", "algorithm.kl=in_reward").config.algorithm.kl is KL.IN_REWARD
    )


def test_problems_reach_the_user():
    with pytest.raises(ConfigError, match="set algorithm"):
        composed("algorithm=grpo", "max_staleness=1")
