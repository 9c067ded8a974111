"""Advantages that differ within a trajectory, by turn (GiGPO) or token (OTB), against
values worked out by hand, in float64.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
from composed_presets import algorithm

from coupler.batch import Batch
from coupler.errors import CouplerError
from coupler.interfaces import Algorithm
from coupler_algos import anchors, token_baseline
from coupler_algos.config import GRPOConfig
from coupler_algos.grpo import GRPO
from coupler_algos.turns import Sampled

TRAJECTORY = np.array([10, 11, 11, 12])
REWARD = np.array([4.0, 0, 0, 2])
SAMPLED = (1, 3, 4, 6, 8, 9, 11, 12)
"""The places of sampled tokens. Rows begin with a prompt, and trajectory 10 was shown
token 2 after its first turn."""


def column(*values: float, other: float = np.nan, dtype: type = np.float64) -> np.ndarray:
    """Place the values of sampled tokens in a column with ``other`` between them."""
    whole = np.full(13, other)
    whole[list(SAMPLED)] = values
    return whole.astype(dtype)


def batch_of(**columns: np.ndarray) -> Batch:
    """Return a group of three trajectories, the second in two rows, the later first."""
    given = {
        "tokens": np.arange(13, dtype=np.int32),
        "loss_mask": np.isin(np.arange(13), SAMPLED),
        "turn": column(0, 1, 1, 1, 0, 0, 0, 1, other=-1, dtype=np.int32),
        "anchor": column(7, 8, 8, 8, 7, 7, 8, 8, other=-1, dtype=np.int64),
        **columns,
    }
    seqs = {"reward": REWARD, "group": np.zeros(4, np.int64), "trajectory": TRAJECTORY}
    return Batch(np.array([5, 2, 3, 3]), given, seqs)


def advantages(policy: Algorithm, batch: Batch) -> list[float]:
    found = policy.advantages(batch)["advantages"]
    assert found.dtype == np.float32 and not found[~batch["loss_mask"]].any()
    return found[batch["loss_mask"]].tolist()


def near(expected: list[float]) -> object:
    return pytest.approx(expected, rel=1e-6, abs=1e-7)


def permuted(batch: Batch, order: list[int]) -> Batch:
    assert sorted(order) == list(range(len(batch)))
    return batch.take(order)


def test_tokens_are_in_the_order_in_which_they_were_sampled() -> None:
    found = Sampled.of(batch_of())
    assert found.rows.tolist() == [1, 3, 4, 8, 9, 6, 11, 12]
    assert found.trajectory.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert found.turn.tolist() == [0, 1, 1, 0, 0, 1, 0, 1]


# --- GiGPO


def test_gigpo_compares_turns_that_were_shown_the_same() -> None:
    """Returns are 3.8 and 4, 0 and 0, 1.9 and 2, with a discount of 0.95. Anchor 7 has
    3.8 and 0. Anchor 8 has 4, 0, 1.9 and 2, whose mean is 1.975. Trajectories have 2,
    -2 and 0 around their mean.
    """
    policy = algorithm("gigpo", "algorithm.scale_by_std=false", "algorithm.kl=none")
    exact = anchors.compared(policy.config, batch_of(), np.array([4.0, 0, 2]))
    steps = [1.9, 2.025, 2.025, -1.975, -1.9, -1.9, -0.075, 0.025]
    assert exact[list(SAMPLED)].tolist() == pytest.approx(steps, rel=1e-12, abs=1e-14)

    whole = [3.9, 4.025, 4.025, -3.975, -3.9, -3.9, -0.075, 0.025]
    assert advantages(policy, batch_of()) == near(whole)


def test_gigpo_divides_by_the_deviation_of_each_group() -> None:
    """That of the rewards is 2, that of anchor 7 is 1.9 * sqrt(2), and that of anchor 8
    is the root of (2.025^2 + 1.975^2 + 0.075^2 + 0.025^2) / 3.
    """
    deviation = sqrt((2.025**2 + 1.975**2 + 0.075**2 + 0.025**2) / 3) + 1e-6
    first, whole = 1.9 / (1.9 * sqrt(2) + 1e-6), 2 / (2 + 1e-6)
    second = [x / deviation for x in (2.025, 2.025, -1.975)]
    third = [x / deviation for x in (-0.075, 0.025)]

    policy = algorithm("gigpo", "algorithm.kl=none")
    exact = anchors.compared(policy.config, batch_of(), np.array([4.0, 0, 2]))
    steps = [first, *second, -first, -first, *third]
    assert exact[list(SAMPLED)].tolist() == pytest.approx(steps, rel=1e-12, abs=1e-14)
    means = np.array([whole] * 3 + [-whole] * 3 + [0, 0])
    assert advantages(policy, batch_of()) == near((means + steps).tolist())

    half = algorithm("gigpo", "algorithm.kl=none", "algorithm.anchor_coef=0.5")
    assert advantages(half, batch_of()) == near((means + np.array(steps) / 2).tolist())


def test_gigpo_takes_the_rewards_of_turns_where_there_are_some() -> None:
    """They are 1 and 3, 0 and 2, 5 and 0: returns 3.85 and 3, 1.9 and 2, 5 and 0.
    Anchor 7 has 3.85 and 1.9, and anchor 8 has 3, 2, 5 and 0, whose mean is 2.5.
    """
    policy = algorithm("gigpo", "algorithm.scale_by_std=false", "algorithm.kl=none")
    batch = batch_of(token_reward=column(1, 0, 3, 2, 0, 0, 5, 0))
    exact = anchors.compared(policy.config, batch, np.array([4.0, 0, 2]))
    steps = [0.975, 0.5, 0.5, -0.5, -0.975, -0.975, 2.5, -2.5]
    assert exact[list(SAMPLED)].tolist() == pytest.approx(steps, rel=1e-12, abs=1e-14)


def test_turns_whose_anchors_are_their_own_leave_grpo() -> None:
    lone = batch_of(anchor=column(1, 2, 2, 3, 4, 4, 5, 6, other=-1, dtype=np.int64))
    policy = algorithm("gigpo", "algorithm.kl=none")
    assert advantages(policy, lone) == advantages(GRPO(replace(policy.config, anchor_coef=0)), lone)


def test_anchors_of_other_prompts_are_others() -> None:
    """Each of two groups has its own, of the same digests."""
    policy = algorithm("gigpo", "algorithm.kl=none")
    one = batch_of()
    other = one.with_seqs(group=one["group"] + 1, trajectory=one["trajectory"] + 9, reward=-REWARD)
    first, second = advantages(policy, one), advantages(policy, other)
    assert advantages(policy, Batch.concat([one, other])) == [*first, *second]


# --- OTB

PROBABILITIES = column(0.5, 0.5, 0.5, 0.5, 0.25, 0.5, 0.5, 0.5)
SQUARES = column(0.5, 0.25, 0.5, 0.25, 0.5, 0.25, 0.25, 0.5)


def for_otb(**columns: np.ndarray) -> Batch:
    given = {"old_logprobs": np.log(PROBABILITIES), "sum_pi_squared": SQUARES}
    return batch_of(**{**given, **columns})


def test_otb_weighs_each_position_by_the_squared_gradients_up_to_it() -> None:
    """Squared gradients are 0.5, 0.25 and 0.5; 1, 0.25 and 0.25; 0.25 and 0.5. Up to
    each position they are 0.5, 0.75 and 1.25; 1, 1.25 and 1.5; 0.25 and 0.75. Baselines
    of the rewards 4, 0 and 2 are 2.5 / 1.75, 4.5 / 2.75 and 5 / 2.75.
    """
    first, second, third = 2.5 / 1.75, 4.5 / 2.75, 5 / 2.75
    mine = [4 - first, 4 - second, 4 - third]
    # The last token of trajectory 11 comes first in the batch.
    expected = [*mine, -third, -first, -second, 2 - first, 2 - second]
    policy = algorithm("otb")
    exact = token_baseline.subtracted(policy.config, for_otb(), np.array([4.0, 0, 2]))
    assert exact[list(SAMPLED)].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert advantages(policy, for_otb()) == near(expected)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_otb_weighs_squared_gradients_as_the_correction_weighs_their_tokens(ratio: str) -> None:
    """The first token of trajectory 10 became 8 times as likely as it was sampled. That
    counts as 2, for itself or for all three. Squared gradients of the trajectory become
    2, 0.25 and 0.5, or 2, 1 and 2.
    """
    given = np.log(PROBABILITIES)
    batch = for_otb(rollout_logprobs=given - np.log(8) * (np.arange(13) == 1))
    options = ("algorithm.correction_cap=2", f"algorithm.correction_ratio={ratio}")
    own = (2, 2.25, 2.75) if ratio == "token" else (2, 3, 5)

    first = (4 * own[0] + 2 * 0.25) / (own[0] + 1 + 0.25)
    second = (4 * own[1] + 2 * 0.75) / (own[1] + 1.25 + 0.75)
    third = 4 * own[2] / (own[2] + 1.5)
    expected = [4 - first, 4 - second, 4 - third, -third, -first, -second, 2 - first, 2 - second]
    assert advantages(algorithm("otb", *options), batch) == near(expected)


def test_otb_has_nothing_to_compare_where_one_sample_goes_on() -> None:
    mask = batch_of()["loss_mask"].copy()
    mask[[6, 8, 12]] = False
    found = advantages(algorithm("otb"), for_otb(loss_mask=mask))
    assert found[1:3] == [0, 0] and all([found[0], *found[3:]])


def test_otb_with_equal_gradients_is_the_mean_of_those_that_go_on() -> None:
    """The third position has the rewards 4 and 0."""
    even = for_otb(sum_pi_squared=2 * PROBABILITIES)
    assert advantages(algorithm("otb"), even) == near([2, 2, 2, -2, -2, -2, 0, 0])


def test_tokens_that_are_certain_have_the_plain_mean() -> None:
    sure = batch_of(old_logprobs=column(*[0] * 8), sum_pi_squared=column(*[1 - 1e-8] * 8))
    assert advantages(algorithm("otb"), sure) == near([2, 2, 2, -2, -2, -2, 0, 0])


def test_otb_may_be_scaled_as_others_are() -> None:
    plain = np.array(advantages(algorithm("otb"), for_otb()))
    scaled = advantages(algorithm("otb", "algorithm.scale_by_std=true"), for_otb())
    assert scaled == near((plain / 2).tolist())


def test_the_squared_gradient_of_a_log_prob_needs_two_numbers() -> None:
    """``|onehot - p|^2`` is ``1 - 2 p + sum of p^2``."""
    logits = np.random.default_rng(0).normal(size=50)
    p = np.exp(logits) / np.exp(logits).sum()
    gradient = np.eye(50)[7] - p
    assert (gradient**2).sum() == pytest.approx(1 - 2 * p[7] + (p**2).sum(), rel=1e-12)


# --- both


@pytest.mark.parametrize("name", ["gigpo", "otb"])
def test_they_stay_the_same_in_any_order_of_rows(name: str) -> None:
    policy = algorithm(name, "algorithm.kl=none")
    want = policy.advantages(for_otb())["advantages"]
    for order in ([3, 1, 0, 2], [2, 3, 1, 0]):
        batch = permuted(for_otb(), order)
        found = policy.advantages(batch)["advantages"]
        assert dict(zip(batch["tokens"], found, strict=True)) == pytest.approx(
            dict(zip(range(13), want, strict=True)), rel=1e-6, abs=1e-7
        )


@pytest.mark.parametrize("name", ["gigpo", "otb"])
def test_equal_rewards_say_nothing(name: str) -> None:
    """Under GiGPO a turn that is farther from the reward is worth less, so that only
    turns of equal distance are equal.
    """
    policy = algorithm(name, "algorithm.kl=none", "algorithm.anchor_gamma=1")
    equal = for_otb().with_seqs(reward=np.full(4, 3.0))
    assert advantages(policy, equal) == [0] * 8


@pytest.mark.parametrize("name", ["gigpo", "otb"])
def test_what_was_not_sampled_counts_nothing(name: str) -> None:
    """Rows without a sampled token, turns and numbers under the mask, and no rows."""
    policy = algorithm(name, "algorithm.kl=none")
    mask = for_otb()["loss_mask"].copy()
    mask[5:7] = False
    want = advantages(policy, for_otb(loss_mask=mask))
    assert len(want) == 7 and np.isfinite(want).all()

    noise = {
        key: np.where(mask, for_otb()[key], 3).astype(for_otb()[key].dtype)
        for key in ("turn", "anchor", "old_logprobs", "sum_pi_squared")
    }
    assert advantages(policy, for_otb(**{**noise, "loss_mask": mask})) == want
    nothing = for_otb(loss_mask=np.zeros(13, bool))
    assert not policy.advantages(nothing)["advantages"].any()


@pytest.mark.parametrize("name", ["gigpo", "otb"])
def test_a_sample_that_is_alone_is_refused(name: str) -> None:
    with pytest.raises(CouplerError, match="samples_per_prompt=2"):
        algorithm(name, "algorithm.kl=none").advantages(for_otb().take([0]))


def test_they_say_what_they_read() -> None:
    gigpo, otb = algorithm("gigpo"), algorithm("otb")
    assert gigpo.needs == {"ref_logprobs", "old_logprobs", "turn", "anchor"} and not gigpo.always
    assert otb.needs == {"old_logprobs", "sum_pi_squared", "turn"}
    assert otb.always == {"old_logprobs"}
    assert not GRPO(GRPOConfig()).needs & {"turn", "anchor", "sum_pi_squared"}
