"""Advantages, shaping and dynamic sampling against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from coupler.errors import CouplerError
from coupler.interfaces import Aggregation
from coupler_algos.config import (
    KL,
    Behaviour,
    GRPOConfig,
    KLEstimator,
    PPOConfig,
    RLOOConfig,
    SFTConfig,
)
from coupler_algos.grpo import GRPO
from coupler_algos.ppo import PPO, token_rewards
from coupler_algos.rloo import RLOO
from coupler_algos.sft import SFT
from coupler_algos.shaping import overlong_penalty

REWARDS, GROUPS = (
    [1.0, 3.0, 0.0, 0.0, 1.0, 1.0],
    [7, 3, 7, 7, 3, 7],
)  # group 7: 1 0 0 1, group 3: 3 1


def grpo(**changes) -> GRPO:
    return GRPO(GRPOConfig(**{"kl": KL.NONE, **changes}))


def rloo(**changes) -> RLOO:
    return RLOO(RLOOConfig(**{"kl": KL.NONE, **changes}))


def last_tokens(batch) -> np.ndarray:
    return batch["advantages"][batch.starts[1:] - 1]


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        # std of 1 0 0 1 is sqrt(1/3), of 3 1 it is sqrt(2)
        (grpo(), [0.8660254, 0.70710678, -0.8660254, -0.8660254, -0.70710678, 0.8660254]),
        (grpo(scale_by_std=False), [0.5, 1.0, -0.5, -0.5, -1.0, 0.5]),
        (rloo(), [2 / 3, 2.0, -2 / 3, -2 / 3, -2.0, 2 / 3]),
    ],
)
def test_interleaved_groups_match_the_closed_form(pack, algorithm, expected):
    batch = algorithm.advantages(pack([3, 2, 4, 2, 3, 2], REWARDS, GROUPS))
    np.testing.assert_allclose(last_tokens(batch), expected, rtol=3e-6)
    assert batch["advantages"].dtype == np.float32
    mask = batch["loss_mask"]
    np.testing.assert_array_equal(batch["advantages"][mask], batch.spread(last_tokens(batch))[mask])
    assert not batch["advantages"][~mask].any()


@pytest.mark.parametrize("algorithm", [grpo(), grpo(scale_by_std=False), rloo()])
def test_equal_rewards_have_no_advantage_at_all(pack, algorithm):
    """0.1 is no binary fraction: the mean of three of them is not 0.1, and dividing by
    a tiny std amplifies that.
    """
    batch = pack([2] * 3, [0.0] * 3, [0] * 3).with_seqs(reward=np.full(3, 0.1))
    batch = algorithm.advantages(batch)
    np.testing.assert_array_equal(batch["advantages"], np.zeros(6, np.float32))


@pytest.mark.parametrize("algorithm", [grpo(), grpo(scale_by_std=False), rloo()])
def test_a_group_of_one_is_an_error(pack, algorithm):
    with pytest.raises(
        CouplerError,
        match=r"1 prompt groups have one sample.*first is 4(.|\n)*samples_per_prompt=2",
    ):
        algorithm.advantages(pack([2, 2, 2], [1.0, 0.0, 1.0], [3, 3, 4]))


@pytest.mark.parametrize("algorithm", [grpo(), rloo()])
def test_equal_prompts_with_two_group_ids_stay_two_groups(pack, algorithm):
    """All tokens are equal here: only the ids tell groups apart."""
    apart = algorithm.advantages(pack([2] * 4, [1.0, 0.0, 5.0, 5.0], [0, 0, 1, 1]))
    together = algorithm.advantages(pack([2] * 4, [1.0, 0.0, 5.0, 5.0], [0, 0, 0, 0]))
    assert last_tokens(apart)[2] == 0 and last_tokens(together)[2] > 0


@pytest.mark.parametrize("algorithm", [grpo(), grpo(kl=KL.IN_REWARD), rloo(kl=KL.IN_REWARD)])
def test_row_order_does_not_matter(random_batch, algorithm):
    order = np.random.default_rng(0).permutation(len(random_batch))
    expected = algorithm.advantages(random_batch).take(order)["advantages"]
    np.testing.assert_allclose(
        algorithm.advantages(random_batch.take(order))["advantages"], expected, atol=1e-6
    )


def test_a_trajectory_in_two_rows_counts_once(pack):
    batch = pack([2, 2, 2], [1.0, 1.0, 0.0], [0, 0, 0]).with_seqs(trajectory=np.array([8, 8, 5]))
    np.testing.assert_allclose(
        last_tokens(grpo(scale_by_std=False).advantages(batch)), [0.5, 0.5, -0.5]
    )


def test_overlong_penalty_matches_eq_13_of_dapo():
    penalty = overlong_penalty(np.array([0, 16, 17, 18, 20, 25]), max_tokens=20, buffer_tokens=4)
    np.testing.assert_array_equal(penalty, [0, 0, -0.25, -0.5, -1, -1])


def test_overlong_penalty_counts_the_sampled_tokens_of_a_trajectory(pack):
    algorithm = grpo(scale_by_std=False, overlong_buffer_tokens=4, overlong_max_tokens=8)
    batch = algorithm.advantages(
        pack([5, 7], [1.0, 1.0], [0, 0])
    )  # 4 and 6 sampled tokens: 0 and -0.5
    np.testing.assert_allclose(last_tokens(batch), [0.25, -0.25])
    pieces = pack([5, 4, 4], [1.0] * 3, [0] * 3).with_seqs(
        trajectory=np.array([0, 1, 1])
    )  # 4, and 3 + 3
    np.testing.assert_allclose(last_tokens(algorithm.advantages(pieces)), [0.25, -0.25, -0.25])


@pytest.mark.parametrize(
    ("estimator", "penalty"), [("k1", 0.3), ("k2", 0.145), ("k3", np.exp(-0.5) + np.exp(0.2) - 1.7)]
)
def test_kl_in_the_reward_is_summed_over_the_sampled_tokens(pack, estimator, penalty):
    logprobs = np.array([0, -0.5, -0.8, 0, -1.0, -1.0], np.float32)
    reference = np.array(
        [0, -1.0, -0.6, 0, -1.0, -1.0], np.float32
    )  # log ratios 0.5, -0.2 and none
    batch = pack([3, 3], [1.0, 1.0], [0, 0], old_logprobs=logprobs, ref_logprobs=reference)
    algorithm = rloo(kl=KL.IN_REWARD, kl_coef=0.1, kl_estimator=KLEstimator(estimator))
    np.testing.assert_allclose(
        last_tokens(algorithm.advantages(batch)), [-0.1 * penalty, 0.1 * penalty], rtol=1e-5
    )
    equal = batch.with_tokens(old_logprobs=reference)
    np.testing.assert_allclose(algorithm.advantages(equal)["advantages"], 0, atol=1e-9)


def test_values_under_the_mask_do_not_reach_advantages(random_batch):
    poisoned = random_batch.with_tokens(
        **{
            name: np.where(random_batch["loss_mask"], random_batch[name], np.nan)
            for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs")
        }
    )
    algorithm = rloo(kl=KL.IN_REWARD, kl_coef=0.1)
    np.testing.assert_array_equal(
        algorithm.advantages(poisoned)["advantages"],
        algorithm.advantages(random_batch)["advantages"],
    )


@pytest.mark.parametrize("make", [grpo, rloo])
def test_dynamic_sampling_rejects_equal_rewards_only_when_asked(pack, make):
    equal, mixed = pack([2, 9], [0.1, 0.1], [0, 0]), pack([2, 2], [0.0, 1.0], [0, 0])
    assert make().keep(equal) and make().keep(mixed)
    asked = make(
        dynamic_sampling=True, overlong_buffer_tokens=4, overlong_max_tokens=8
    )  # shaping tells them apart
    assert asked.keep(mixed) and not asked.keep(equal)


def test_needs_and_wants_follow_the_configuration():
    assert GRPO(GRPOConfig()).needs == {"ref_logprobs", "old_logprobs"}
    assert grpo(behaviour=Behaviour.ROLLOUT).needs == frozenset()
    assert rloo(kl=KL.IN_REWARD).needs == {"ref_logprobs", "old_logprobs"}
    assert rloo(kl=KL.IN_REWARD, behaviour=Behaviour.ROLLOUT).needs == {
        "ref_logprobs",
        "old_logprobs",
    }
    assert [o.name for o in grpo().want] == ["logprobs", "entropy"]
    assert [o.name for o in grpo(log_entropy=False).want] == ["logprobs"]
    assert [o.name for o in grpo(log_entropy=False, entropy_coef=0.1).want] == [
        "logprobs",
        "entropy",
    ]
    constant = grpo(aggregation=Aggregation.CONSTANT, aggregation_constant=128)
    assert (constant.aggregation, constant.constant) == (Aggregation.CONSTANT, 128)


@pytest.mark.parametrize("behaviour", list(Behaviour))
def test_kl_on_the_controller_needs_the_trainer_s_logprobs_always(behaviour):
    """KL in the reward and an adaptive coefficient read them; a loss alone has its
    own.
    """
    shared = {"kl_coef": 0.1, "behaviour": behaviour}
    for algorithm in (
        rloo(kl=KL.IN_REWARD, **shared),
        grpo(kl=KL.IN_REWARD, **shared),
        grpo(kl=KL.IN_LOSS, kl_target=1.0, **shared),
        PPO(PPOConfig(**shared)),
    ):
        assert algorithm.always == {"old_logprobs"} <= algorithm.needs
    for algorithm in (
        grpo(**shared),
        grpo(kl=KL.IN_LOSS, **shared),
        PPO(PPOConfig(kl=KL.NONE, **shared)),
    ):
        assert algorithm.always == frozenset()


def test_a_policy_that_equals_its_reference_has_no_kl(pack):
    """Rollout and trainer round differently; that is no divergence from the
    reference.
    """
    trainer = np.array([0, -0.5, -0.8, 0, -1.0, -1.0], np.float32)
    noise = np.array([0, 0.1, -0.2, 0, 0.3, 0.1], np.float32)
    batch = pack(
        [3, 3],
        [1.0, 1.0],
        [0, 0],
        rollout_logprobs=trainer + noise,
        old_logprobs=trainer,
        ref_logprobs=trainer,
    ).with_tokens(values=np.zeros(6, np.float32))
    settings = {
        "kl": KL.IN_REWARD,
        "kl_coef": 0.5,
        "kl_target": 1.0,
        "behaviour": Behaviour.ROLLOUT,
    }
    for algorithm in (rloo(**settings), grpo(**settings)):
        assert not algorithm.advantages(batch)["advantages"].any()
        assert algorithm.controller().update(batch)["kl/trajectory"].value == 0.0
    np.testing.assert_array_equal(token_rewards(PPOConfig(**settings), batch), [0, 0, 1, 0, 0, 1])


def test_sft_leaves_the_batch_alone(pack):
    batch = pack([2], [0.0], [0])
    sft = SFT(SFTConfig())
    assert sft.advantages(batch) is batch
    assert (sft.needs, [o.name for o in sft.want]) == (frozenset(), ["logprobs"])
