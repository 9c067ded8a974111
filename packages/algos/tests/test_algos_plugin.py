"""What core sees of this distribution: backends, problems of a configuration, and no
torch on the controller.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from coupler.config.schema import RunConfig, SamplingConfig
from coupler.interfaces import Aggregation, Algorithm
from coupler_algos import plugin
from coupler_algos.config import (
    KL,
    Behaviour,
    GRPOConfig,
    KLEstimator,
    PPOConfig,
    RLOOConfig,
    SFTConfig,
)
from coupler_algos.ppo import PPO
from coupler_algos.preference_config import OnlineDPOConfig
from coupler_algos.slots import Baseline, Correction, Ratio, Shape


def problems(algorithm, **changes) -> list[str]:
    return list(plugin.coupler_validate(RunConfig(algorithm=algorithm, **changes)))


@pytest.mark.parametrize("backend", list(plugin.coupler_backends()), ids=lambda b: b.name)
def test_every_backend_loads_and_is_built_from_its_defaults(backend):
    config = backend.config()
    assert config.name == backend.name
    algorithm = backend.load()(config)
    assert isinstance(algorithm, Algorithm)
    fixed = Aggregation.SEQUENCE_MEAN_TOKEN_SUM
    assert algorithm.aggregation is getattr(config, "aggregation", fixed)


@pytest.mark.parametrize("algorithm", [GRPOConfig(), RLOOConfig(), PPOConfig(), SFTConfig()])
def test_defaults_have_no_problem(algorithm):
    assert problems(algorithm) == []


def test_other_plugins_algorithms_are_none_of_our_business():
    assert problems(object(), samples_per_prompt=1) == []
    assert problems(SFTConfig(), samples_per_prompt=1) == []


def test_an_algorithm_that_compares_nothing_needs_no_second_sample():
    alone = GRPOConfig(baseline=Baseline.NONE, scale_by_std=False)
    assert problems(PPOConfig(), samples_per_prompt=1) == []
    assert problems(alone, samples_per_prompt=1) == []


@pytest.mark.parametrize(
    ("algorithm", "changes", "words"),
    [
        (
            GRPOConfig(),
            {"samples_per_prompt": 1},
            ["samples_per_prompt=1", "set samples_per_prompt=2"],
        ),
        (
            GRPOConfig(),
            {"max_staleness": 2},
            ["max_staleness=2", "behaviour=rollout", "correction_cap=2"],
        ),
        (GRPOConfig(anchor_coef=1), {}, ["anchor_coef=1", "set environment"]),
        (GRPOConfig(anchor_coef=-1), {"environment": 1}, ["anchor_coef=-1", "0 compares"]),
        (
            GRPOConfig(anchor_coef=1, anchor_gamma=1.5),
            {"environment": 1},
            ["anchor_gamma=1.5", "0.95"],
        ),
        (
            GRPOConfig(anchor_coef=1, ratio=Ratio.SEQUENCE),
            {"environment": 1},
            ["ratio=sequence", "anchor_coef"],
        ),
        (
            GRPOConfig(baseline=Baseline.OPTIMAL_TOKEN, ratio=Ratio.SEQUENCE),
            {},
            ["ratio=sequence", "optimal_token"],
        ),
        (
            GRPOConfig(baseline=Baseline.OPTIMAL_TOKEN, by_part=True),
            {},
            ["baseline=optimal_token", "by_part to false"],
        ),
        (
            GRPOConfig(baseline=Baseline.OPTIMAL_TOKEN, anchor_coef=1),
            {"environment": 1},
            ["baseline=optimal_token", "anchor_coef to 0"],
        ),
        (GRPOConfig(kl_coef=0.0), {}, ["algorithm.kl=in_loss", "algorithm.kl=none"]),
        (RLOOConfig(kl_coef=0.0), {}, ["algorithm.kl=in_reward", "algorithm.kl=none"]),
        (GRPOConfig(kl_estimator=KLEstimator.K1), {}, ["kl_estimator=k1", "k2 or k3"]),
        (
            GRPOConfig(aggregation=Aggregation.CONSTANT),
            {},
            ["aggregation_constant=0", "${sampling.max_tokens}"],
        ),
        (
            SFTConfig(aggregation=Aggregation.CONSTANT),
            {},
            ["aggregation_constant=0", "the longest answer"],
        ),
        (
            SFTConfig(aggregation_constant=8),
            {},
            ["aggregation_constant=8", "does nothing with token_mean"],
        ),
        (
            GRPOConfig(overlong_buffer_tokens=4),
            {},
            ["overlong_buffer_tokens=4", "algorithm.overlong_max_tokens=$"],
        ),
        (
            GRPOConfig(overlong_buffer_tokens=4, overlong_max_tokens=500),
            {},
            ["overlong_max_tokens=500 punishes no completion", "set it to ${sampling.max_tokens}"],
        ),
        (
            GRPOConfig(overlong_buffer_tokens=-1),
            {},
            ["overlong_buffer_tokens=-1", "0 switches it off"],
        ),
        (
            GRPOConfig(overlong_buffer_tokens=100, overlong_max_tokens=100),
            {"sampling": SamplingConfig(max_tokens=100)},
            ["sampling.max_tokens=100", "a fifth, 20"],
        ),
        (GRPOConfig(clip_low=1.0), {}, ["algorithm.clip_low=1.0", "below 1"]),
        (GRPOConfig(clip_high=-0.1), {}, ["algorithm.clip_high=-0.1", "negative"]),
        (GRPOConfig(dual_clip=0.5), {}, ["algorithm.dual_clip=0.5", "above 1"]),
        (GRPOConfig(correction_cap=-1.0), {}, ["algorithm.correction_cap=-1.0", "negative"]),
        (
            GRPOConfig(shape=Shape.GATE),
            {},
            ["algorithm.shape=gate does not clip", "algorithm.clip_low=0.2", "to 0"],
        ),
        (
            GRPOConfig(shape=Shape.DETACHED_CLIP, dual_clip=3.0),
            {},
            ["algorithm.dual_clip=3.0", "does nothing with detached_clip"],
        ),
        (GRPOConfig(kernel_power_negative=-1.0), {}, ["kernel_power_negative=-1.0", "2 and 3"]),
        (GRPOConfig(kernel_rate_positive=-1.0), {}, ["kernel_rate_positive=-1.0", "3 and 2"]),
        (GRPOConfig(second_moment=-1.0), {}, ["algorithm.second_moment=-1.0", "0.04 is usual"]),
        (GRPOConfig(gate_positive=0.0), {}, ["algorithm.gate_positive=0.0", "above 0"]),
        (GRPOConfig(scale_by_mean=True), {}, ["algorithm.scale_by_mean", "set one of them"]),
        (GRPOConfig(opsm_delta=-1.0), {}, ["algorithm.opsm_delta=-1.0", "0 switches it off"]),
        (
            GRPOConfig(correction=Correction.MASK),
            {},
            ["algorithm.correction=mask", "algorithm.correction_cap=5"],
        ),
        (
            GRPOConfig(correction_cap=2.0, correction_floor=0.5),
            {},
            ["algorithm.correction_floor=0.5", "algorithm.correction=mask"],
        ),
        (
            GRPOConfig(correction=Correction.MASK, correction_cap=2.0, correction_floor=3.0),
            {},
            ["algorithm.correction_floor=3.0", "below algorithm.correction_cap=2.0"],
        ),
        (
            GRPOConfig(shape=Shape.TAPER),
            {},
            ["algorithm.shape=taper does not clip", "algorithm.clip_high=0.2"],
        ),
        (
            GRPOConfig(shape=Shape.TV_MASK, ratio=Ratio.GEOMETRIC),
            {},
            ["algorithm.ratio=geometric", "set algorithm.ratio=token"],
        ),
        (
            GRPOConfig(shape=Shape.LIKELIHOOD, ratio=Ratio.SEQUENCE, clip_low=0.0, clip_high=0.0),
            {},
            ["algorithm.shape=likelihood has no ratio", "set algorithm.ratio=token"],
        ),
        (
            GRPOConfig(kl=KL.IN_RETURN, ratio=Ratio.SEQUENCE),
            {},
            ["algorithm.kl=in_return", "set algorithm.kl=in_reward"],
        ),
        (PPOConfig(kl=KL.IN_RETURN), {}, ["algorithm.kl=in_return", "algorithm.kl=in_reward"]),
        (
            RLOOConfig(teacher_coef=1.0, reward_coef=0.0, ratio=Ratio.TOKEN),
            {},
            ["algorithm.kl=in_reward", "reward_coef=0", "set algorithm.kl=in_loss or none"],
        ),
        (
            GRPOConfig(teacher_coef=1.0, reward_coef=0.0, kl=KL.IN_RETURN),
            {},
            ["algorithm.kl=in_return changes rewards"],
        ),
        (
            PPOConfig(teacher_coef=1.0, reward_coef=0.0, kl=KL.NONE),
            {},
            ["algorithm.reward_coef=0", "critic", "set algorithm=opd"],
        ),
        (
            OnlineDPOConfig(),
            {"optimizer_steps_per_batch": 5, "prompts_per_step": 4, "samples_per_prompt": 5},
            ["optimizer_steps_per_batch=5", "prompts_per_step=4 or less"],
        ),
        (GRPOConfig(covariance_share=1.5), {}, ["covariance_share=1.5", "0.002 is usual"]),
        (GRPOConfig(covariance_kl=1.0), {}, ["covariance_share=0 marks none", "set it to 0.002"]),
        (
            GRPOConfig(covariance_share=0.1, covariance_low=5.0, covariance_high=1.0),
            {},
            ["algorithm.covariance_low=5.0", "below algorithm.covariance_high=1.0"],
        ),
        (
            GRPOConfig(covariance_share=0.1, covariance_kl=-1.0),
            {},
            ["algorithm.covariance_kl=-1.0", "must not be negative"],
        ),
        (GRPOConfig(proximal_coef=-1.0), {}, ["algorithm.proximal_coef=-1.0", "0 switches it off"]),
        (
            GRPOConfig(correction_normalize=True),
            {},
            ["algorithm.correction_normalize", "algorithm.correction_cap", "set it to 2"],
        ),
        (
            GRPOConfig(reject={"sequence_k3": 0.1}),
            {},
            ["algorithm.reject.sequence_k3 is unknown", "sequence_mean_k3"],
        ),
        (
            GRPOConfig(reject={"token_k2": 0.0}),
            {},
            ["algorithm.reject.token_k2=0.0", "a bound above 0"],
        ),
        (
            GRPOConfig(baseline=Baseline.NONE, scale_by_std=False, scale_by_informative=True),
            {},
            ["algorithm.scale_by_informative", "algorithm.baseline=none"],
        ),
        (
            GRPOConfig(baseline=Baseline.GREEDY, by_part=True),
            {},
            ["algorithm.baseline=greedy", "algorithm.by_part"],
        ),
        (
            GRPOConfig(baseline=Baseline.MOVING_MEAN),
            {},
            ["algorithm.baseline=moving_mean", "algorithm.scale_by_std"],
        ),
        (
            GRPOConfig(baseline_decay=1.0),
            {},
            ["algorithm.baseline_decay=1.0", "below 1"],
        ),
        (
            GRPOConfig(baseline=Baseline.NONE),
            {"samples_per_prompt": 1},
            ["samples_per_prompt=1", "set samples_per_prompt=2"],
        ),
        (
            GRPOConfig(part_weights={"a": 1.0}),
            {},
            ["algorithm.part_weights", "set algorithm.by_part=true"],
        ),
        (
            GRPOConfig(by_part=True, kl=KL.IN_REWARD),
            {},
            ["algorithm.by_part", "algorithm.kl=in_reward", "in_loss"],
        ),
        (PPOConfig(ratio=Ratio.SEQUENCE), {}, ["algorithm.ratio=sequence", "token or geometric"]),
        (PPOConfig(gamma=1.5), {}, ["algorithm.gamma=1.5", "between 0 and 1"]),
        (PPOConfig(lam=-0.1), {}, ["algorithm.lam=-0.1", "between 0 and 1"]),
        (PPOConfig(value_clip=-1.0), {}, ["algorithm.value_clip=-1.0", "0 switches it off"]),
        (PPOConfig(kl_target=-1.0), {}, ["algorithm.kl_target=-1.0", "algorithm.kl_coef"]),
        (PPOConfig(kl_horizon=0), {}, ["algorithm.kl_horizon=0", "at least 1"]),
        (
            PPOConfig(kl_target=6.0, kl_horizon=12),
            {"prompts_per_step": 15, "samples_per_prompt": 4},
            [
                "algorithm.kl_horizon=12",
                "60 trajectories of a step",
                "set algorithm.kl_horizon=60 or more",
            ],
        ),
        (
            GRPOConfig(kl=KL.NONE, kl_target=6.0),
            {},
            ["algorithm.kl_target=6.0", "algorithm.kl=in_reward"],
        ),
        (PPOConfig(), {"max_staleness": 2}, ["max_staleness=2", "behaviour=rollout"]),
        (
            GRPOConfig(correction_cap=2.0, behaviour=Behaviour.ROLLOUT),
            {},
            ["correction_cap", "does nothing"],
        ),
    ],
)
def test_one_mistake_is_one_sentence_with_key_and_fix(algorithm, changes, words):
    (problem,) = problems(algorithm, **changes)
    assert "\n" not in problem and problem.endswith(".")
    for word in words:
        assert word in problem


def test_the_shortest_horizon_that_is_accepted_keeps_the_coefficient_positive(pack):
    """Sixty trajectories without any KL: the error is -0.2, and 1 - 0.2 * 60 / 13 is
    above 0.
    """
    config = PPOConfig(kl_target=6.0, kl_horizon=13)
    assert problems(config, prompts_per_step=15, samples_per_prompt=4) == []
    zeros = np.zeros(120, np.float32)
    batch = pack([2] * 60, [0.0] * 60, [0] * 60, old_logprobs=zeros, ref_logprobs=zeros)
    controller = PPO(config).controller()
    controller.update(batch)
    assert 0 < controller.state()["value"] < config.kl_coef


def test_a_horizon_without_a_target_is_not_judged():
    assert problems(PPOConfig(kl_horizon=1), prompts_per_step=15, samples_per_prompt=4) == []


def test_either_fix_for_staleness_is_accepted():
    assert problems(GRPOConfig(behaviour=Behaviour.ROLLOUT), max_staleness=2) == []
    assert problems(GRPOConfig(correction_cap=2.0), max_staleness=2) == []
    assert problems(GRPOConfig(kl=KL.NONE, kl_coef=0.0)) == []


def test_the_controller_needs_no_torch():
    """Constructing an algorithm and computing advantages happens where no tensor
    library may be.
    """
    code = """
import sys
import numpy as np
from coupler.batch import Batch
from coupler_algos import plugin
tokens = {name: np.zeros(4) for name in ("old_logprobs", "ref_logprobs", "values")}
batch = Batch(np.array([2, 2]), {"loss_mask": np.array([False, True] * 2), **tokens},
              {"reward": np.array([1.0, 0.0]), "group": np.zeros(2, int)})
for backend in plugin.coupler_backends():
    algorithm = backend.load()(backend.config())
    assert algorithm.keep(batch)
    algorithm.advantages(batch)
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
