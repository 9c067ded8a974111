"""Advantages and losses of presets against values worked out by hand, in float64."""

from __future__ import annotations

from dataclasses import replace
from math import e, exp, log

import numpy as np
import pytest
import torch
from composed_presets import algorithm

from coupler.batch import Batch
from coupler.errors import CouplerError
from coupler.interfaces import Algorithm
from coupler.loop.loss_weight import loss_weight
from coupler.metrics import values
from coupler.testing.reference import torch_columns
from coupler_algos.config import GRPOConfig
from coupler_algos.covariance import MARKED, marks
from coupler_algos.second_moment import FAR, far

# Three sequences with 2, 1 and 3 sampled tokens after a prompt of one. Log-probs were
# -1 and moved by these.
LENGTHS = np.array([3, 2, 4])
MOVES = ((0.1, 0.5), (-0.9,), (0.2, -0.2, 0.3))
ADVANTAGES = (2.0, -1.0, 0.5)


def batch_of(**columns: np.ndarray) -> Batch:
    mask = np.ones(9, bool)
    mask[[0, 3, 5]] = False
    old = np.where(mask, -1.0, 0.0)
    tokens = {"tokens": np.arange(9, dtype=np.int32), "loss_mask": mask, "old_logprobs": old}
    advantages = np.where(mask, np.repeat(ADVANTAGES, LENGTHS), 0)
    given = {**tokens, "rollout_logprobs": old, "advantages": advantages, **columns}
    return Batch(LENGTHS, given, {"trajectory": np.array([4, 7, 2])})


def losses_of(
    policy: Algorithm, **columns: np.ndarray
) -> tuple[list[float], list[float], dict[str, float], np.ndarray]:
    """Return loss and gradient of each sampled token, the metrics and the weights."""
    batch = batch_of(**columns)
    mask = batch["loss_mask"]
    now = np.zeros(9)
    now[mask] = np.concatenate(MOVES) - 1
    logprobs = torch.tensor(now, requires_grad=True)

    loss, metrics = policy.loss({"logprobs": logprobs}, torch_columns(batch))
    loss.sum().backward()
    assert logprobs.grad is not None
    weights = loss_weight(batch, policy.aggregation, policy.constant)[mask]
    return loss.detach()[mask].tolist(), logprobs.grad[mask].tolist(), values(metrics), weights


def near(expected: list[float]) -> object:
    return pytest.approx(expected, rel=1e-12, abs=1e-14)


# --- losses


def test_gmpo_clips_the_moves_of_tokens_and_then_takes_their_mean() -> None:
    """The moves are 0.1 and 0.4, -0.4, and 0.2, -0.2 and 0.3: a token beyond +-0.4
    stays in the mean and has no gradient.
    """
    loss, grad, metrics, weights = losses_of(algorithm("gmpo"))
    first, second, third = exp(0.25), exp(-0.4), exp(0.1)
    assert loss == near([-2 * first] * 2 + [second] + [-0.5 * third] * 3)
    assert grad == near([-2 * first, 0, 0] + [-0.5 * third] * 3)
    assert (metrics["clip_high"], metrics["clip_low"]) == near((1 / 6, 1 / 6))
    assert weights.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 3, 1 / 9, 1 / 9, 1 / 9])


def test_luspo_weighs_the_loss_of_gspo_by_length() -> None:
    """All three are beyond GSPO's limits: the first and the third above, on the side
    that has no gradient, and the second below.
    """
    loss, grad, _, weights = losses_of(algorithm("luspo"))
    assert loss == near([-2 * 1.0004] * 2 + [0.9997] + [-0.5 * 1.0004] * 3)
    assert grad == [0] * 6
    assert weights.tolist() == pytest.approx([1 / 3] * 6)

    loss, grad, *_ = losses_of(algorithm("luspo", "algorithm.clip_low=0", "algorithm.clip_high=0"))
    expected = [-2 * exp(0.3)] * 2 + [exp(-0.9)] + [-0.5 * exp(0.1)] * 3
    assert (loss, grad) == (near(expected), near(expected))


def test_dppo_drops_tokens_whose_probability_moved_too_far() -> None:
    """From 1/e, exp(-0.5) is 0.24 higher and exp(-1.9) 0.22 lower: both beyond 0.2."""
    loss, grad, metrics, _ = losses_of(algorithm("dppo"))
    moves = np.concatenate(MOVES)
    kept = np.array([2, 0, 0, 0.5, 0.5, 0.5])
    assert loss == near((-kept * np.exp(moves) + 0.001 * moves**2).tolist())
    assert grad == near((-kept * np.exp(moves) + 0.002 * moves).tolist())
    assert (metrics["clip_high"], metrics["clip_low"]) == near((1 / 6, 1 / 6))


def test_gpg_is_the_likelihood_weighed_by_the_advantage() -> None:
    loss, grad, *_ = losses_of(algorithm("gpg"))
    assert loss == near([2 * 0.9, 2 * 0.5, -1.9, 0.5 * 0.8, 0.5 * 1.2, 0.5 * 0.7])
    assert grad == near([-2, -2, 1, -0.5, -0.5, -0.5])


def test_topr_pushes_down_as_far_as_the_policy_still_goes() -> None:
    """Sequence 2 became exp(-0.9) times as likely. The others are imitated in full."""
    loss, grad, metrics, weights = losses_of(algorithm("topr"))
    assert loss == near([2 * 0.9, 2 * 0.5, -exp(-0.9) * 1.9, 0.5 * 0.8, 0.5 * 1.2, 0.5 * 0.7])
    assert grad == near([-2, -2, exp(-0.9), -0.5, -0.5, -0.5])
    assert metrics["ratio_max"] == pytest.approx(exp(0.6), rel=1e-12)
    assert weights.tolist() == pytest.approx([1 / 3] * 6)


def test_vespo_weighs_by_a_kernel_of_the_ratio_of_the_sequence() -> None:
    """The sequences became exp(0.6), exp(-0.9) and exp(0.3) times as likely. The kernel
    is r^2 exp(3 (1 - r)) where A > 0 and r^3 exp(2 (1 - r)) elsewhere.
    """
    loss, grad, _, weights = losses_of(algorithm("vespo"))
    first, third = (exp(2 * x + 3 * (1 - exp(x))) for x in (0.6, 0.3))
    second = exp(-2.7 + 2 * (1 - exp(-0.9)))
    expected = [2 * 0.9 * first, 2 * 0.5 * first, -1.9 * second]
    assert loss == near(expected + [0.5 * third * x for x in (0.8, 1.2, 0.7)])
    assert grad == near([-2 * first] * 2 + [second] + [-0.5 * third] * 3)
    assert weights.tolist() == pytest.approx([1 / 3] * 6)


def test_dro_is_the_likelihood_held_by_the_squared_move() -> None:
    loss, grad, *_ = losses_of(algorithm("dro"))
    moves, advantages = np.concatenate(MOVES), np.array([2, 2, -1, 0.5, 0.5, 0.5])
    assert loss == near((advantages * (1 - moves) + 0.025 * moves**2).tolist())
    assert grad == near((-advantages + 0.05 * moves).tolist())


def test_kpop_drops_tokens_whose_coins_differ() -> None:
    """Probabilities went from exp(-1) = 0.368 to 0.607, 0.117 nats apart, and to 0.150,
    0.118 apart; the next, 0.497, is 0.034 apart. Others are the plain ratio.
    """
    now = np.zeros(9)
    now[batch_of()["loss_mask"]] = np.concatenate(MOVES) - 1
    loss, grad, metrics, weights = losses_of(algorithm("kpop"), old_logprobs=now)
    plain = -np.array([2, 2, -1, 0.5, 0.5, 0.5]) * np.exp(np.concatenate(MOVES))
    kept = plain * [1, 0, 0, 1, 1, 1]
    assert (loss, grad) == (near(kept.tolist()), near(kept.tolist()))
    assert metrics["rejected"] == pytest.approx(1 / 3)
    assert weights.tolist() == pytest.approx([1 / 6] * 6)


def test_m2po_gives_no_gradient_to_tokens_that_are_too_far() -> None:
    """Others are the plain ratio times the advantage."""
    gone = np.array([0, 0, 1, 0, 0, 0, 1, 0, 0], np.float32)
    loss, grad, metrics, _ = losses_of(algorithm("m2po"), **{FAR: gone})
    plain = -np.array([2, 2, -1, 0.5, 0.5, 0.5]) * np.exp(np.concatenate(MOVES))
    kept = plain * [1, 0, 1, 0, 1, 1]
    assert (loss, grad) == (near(kept.tolist()), near(kept.tolist()))
    assert metrics["second_moment_masked"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        # moves onward: 0.1 and 0.5 (A > 0), -0.9 (A < 0), 0.2 and 0.3 (A > 0)
        (0.25, [0, 0, 0, 0, 0, 0]),
        (0.2, [0, 0, 1, 0, 0, 0]),
        (0.05, [0, 1, 1, 0, 0, 0]),
        (0.03, [0, 1, 1, 0, 0, 1]),
        (0.005, [1, 1, 1, 1, 0, 1]),
    ],
)
def test_m2po_drops_the_farthest_until_the_rest_is_near(bound: float, expected: list[int]) -> None:
    """The squares of the moves onward are 0.01, 0.04, 0.09, 0.25 and 0.81, with means
    of 0.01, 0.025, 0.0467, 0.0975 and 0.24 from the least on.
    """
    batch = batch_of()
    mask = batch["loss_mask"]
    now = batch["old_logprobs"].copy()
    now[mask] += np.concatenate(MOVES)
    batch = batch_of(old_logprobs=now, rollout_logprobs=batch["old_logprobs"])
    found = far(GRPOConfig(second_moment=bound), batch)
    assert found[mask].tolist() == expected
    assert not found[~mask].any()


def test_clip_cov_takes_the_gradient_from_marked_tokens() -> None:
    """Unmarked ones are clipped at 0.8 and 1.2, as in PPO."""
    marked = np.array([0, 1, 0, 0, 0, 0, 1, 0, 0], np.float32)
    loss, grad, metrics, _ = losses_of(algorithm("clip_cov"), **{MARKED: marked})
    ratios = [exp(0.1), 1.2, 0.8, 1.2, exp(-0.2), 1.2]
    assert loss == near((-np.array([2, 2, -1, 0.5, 0.5, 0.5]) * ratios).tolist())
    assert grad == near([0, 0, 0, 0, -0.5 * exp(-0.2), 0])
    assert metrics["covariance_marked"] == pytest.approx(1 / 3)


def test_kl_cov_holds_marked_tokens() -> None:
    marked = np.array([0, 1, 0, 0, 0, 0, 0, 1, 0], np.float32)
    loss, grad, *_ = losses_of(algorithm("kl_cov"), **{MARKED: marked})
    plain = -np.array([2, 2, -1, 0.5, 0.5, 0.5]) * np.exp(np.concatenate(MOVES))
    assert loss == near((plain + np.array([0.1, 0, 0, 0, 0.2, 0])).tolist())
    assert grad == near((plain + np.array([1, 0, 0, 0, -1, 0])).tolist())


# --- advantages


def advantages_of(policy: Algorithm, rewards: list[float], **columns: np.ndarray) -> list[float]:
    """Return the advantage of the last token of each sequence, groups 5, 5 and 8."""
    batch = batch_of().without("advantages")
    seqs = {"reward": np.array(rewards), "group": np.array([5, 5, 5]), **columns}
    found = policy.advantages(batch.with_seqs(**seqs))["advantages"]
    return found[batch.starts[1:] - 1].tolist()


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.25, 0.0], [0.75, 0, 0]),
        ([0.5, 2.0, -1.0], [0, 1.5, 0]),
        ([1.0, 1.0, 0.0], [0, 0, 0]),
        ([-3.0, -1.0, -2.0], [0, 1.0, 0]),
    ],
)
def test_pass_at_k_gives_the_best_what_it_is_ahead(
    rewards: list[float], expected: list[float]
) -> None:
    """Each is max(all) - max(all others): 0 but for a best one that is alone."""
    assert advantages_of(algorithm("pass_at_k"), rewards) == pytest.approx(expected)


def test_gdpo_compares_each_part_and_whitens_their_sum() -> None:
    """Part a: 1, 0 and 0, mean 1/3 and std 3^-0.5. Part b: 0, 4 and 2, mean 2 and std
    2, with weight 1/2. Whitening is over 2, 1 and 3 tokens.
    """
    parts = {"reward_parts/a": np.array([1.0, 0, 0]), "reward_parts/b": np.array([0.0, 4, 2])}
    policy = algorithm("gdpo", "algorithm.part_weights.b=0.5")
    a = [x / (3**-0.5 + 1e-6) for x in (2 / 3, -1 / 3, -1 / 3)]
    b = [x / (2 + 1e-6) for x in (-2, 2, 0)]
    total = [x + 0.5 * y for x, y in zip(a, b, strict=True)]

    mean = (2 * total[0] + total[1] + 3 * total[2]) / 6
    spread = sum(n * (x - mean) ** 2 for n, x in zip((2, 1, 3), total, strict=True)) / 6
    expected = [(x - mean) / (spread**0.5 + 1e-8) for x in total]
    assert advantages_of(policy, [9.0, 9, 9], **parts) == pytest.approx(
        expected, rel=1e-6, abs=1e-7
    )


def test_gdpo_refuses_rewards_without_the_parts_that_it_weighs() -> None:
    with pytest.raises(CouplerError, match="these have none"):
        advantages_of(algorithm("gdpo"), [1.0, 0, 0])
    policy = algorithm("gdpo", "algorithm.part_weights.b=0.5")
    with pytest.raises(CouplerError, match="weighs b, which no reward has"):
        advantages_of(policy, [1.0, 0, 0], **{"reward_parts/a": np.array([1.0, 0, 0])})


def test_gpg_makes_up_for_groups_that_are_equal() -> None:
    """Of two groups of 2 samples, one has equal rewards: the other counts twice."""
    batch = Batch(
        np.array([2] * 4),
        {"loss_mask": np.array([False, True] * 4), "tokens": np.zeros(8, np.int32)},
        {"reward": np.array([1.0, 1, 1, 0]), "group": np.array([3, 3, 1, 1])},
    )
    found = algorithm("gpg").advantages(batch)["advantages"]
    assert found[1::2].tolist() == [0, 0, 1, -1]


def test_reinforce_plus_plus_counts_the_divergence_that_is_to_come() -> None:
    """A_t = R - beta * sum of KL from t on, k1 = log p_old - log p_ref, then whitened
    over 6 tokens.
    """
    reference = np.array([0, -1.5, -2, 0, -1, 0, -0.5, -1, -3])
    policy = algorithm("reinforce_plus_plus", "algorithm.kl_coef=0.1")
    batch = batch_of(ref_logprobs=reference).without("advantages")
    batch = batch.with_seqs(reward=np.array([1.0, 0, 0.5]), group=np.array([1, 2, 3]))
    found = policy.advantages(batch)["advantages"][batch["loss_mask"]]

    # KL of the tokens: 0.5 and 1, 0, and -0.5, 0 and 2.
    raw = np.array([1 - 0.15, 1 - 0.1, 0, 0.5 - 0.15, 0.5 - 0.2, 0.5 - 0.2])
    expected = (raw - raw.mean()) / raw.std()
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def test_remax_compares_with_the_greedy_episode() -> None:
    """Two prompts of one sample each and one of two, without divergence."""
    batch = Batch(
        np.array([2] * 3),
        {
            "loss_mask": np.array([False, True] * 3),
            "tokens": np.zeros(6, np.int32),
            **{name: np.zeros(6, np.float32) for name in ("old_logprobs", "ref_logprobs")},
        },
        {
            "reward": np.array([1.0, 0.25, 0.5]),
            "greedy_reward": np.array([0.75, 0.5, 0.5]),
            "group": np.array([1, 2, 2]),
        },
    )
    policy = algorithm("remax", "samples_per_prompt=1")
    assert policy.advantages(batch)["advantages"][1::2].tolist() == [0.25, -0.25, 0]


def test_rae_subtracts_the_moving_mean_of_the_side_that_was_played() -> None:
    """Three trajectories, of which the last has two rows. With a decay of 0.95, means
    of rewards 1 and 3 of one side and -1 of the other go from 0 to 0.05 and 0.1975, and
    to -0.05.
    """
    sides = np.array(["first", "second", "first", "first"])
    batch = Batch(
        np.array([2] * 4),
        {
            "loss_mask": np.array([False, True] * 4),
            "tokens": np.zeros(8, np.int32),
        },
        {
            "reward": np.array([1.0, -1.0, 3.0, 3.0]),
            "data_source": sides,
            "trajectory": np.array([0, 1, 2, 2]),
            "group": np.array([1, 2, 3, 3]),
        },
    )
    policy = algorithm("rae", "samples_per_prompt=1")
    means = policy.controller()
    assert means is not None and "data_source" in policy.needs

    first = means.apply(batch)
    assert policy.advantages(first)["advantages"][1::2].tolist() == [1, -1, 3, 3]
    assert values(means.update(first)) == {"baseline/moving_mean": 0}
    assert means.state() == pytest.approx({"first": 0.05 * 0.95 + 0.15, "second": -0.05})

    again = algorithm("rae", "samples_per_prompt=1").controller()
    assert again is not None
    again.restore(means.state())
    found = policy.advantages(again.apply(batch))["advantages"][1::2]
    expected = [1 - 0.1975, -0.95, 3 - 0.1975, 3 - 0.1975]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


# --- covariance


def marked_of(policy: Algorithm, advantages: list[float], logprobs: list[float]) -> list[int]:
    """Return which sampled tokens are marked."""
    number = len(advantages)
    batch = Batch(
        np.array([number]),
        {
            "tokens": np.arange(number, dtype=np.int32),
            "loss_mask": np.ones(number, bool),
            "old_logprobs": np.array(logprobs, np.float32),
            "advantages": np.array(advantages, np.float32),
        },
    )
    return np.flatnonzero(marks(policy.config, batch)).tolist()


def test_kl_cov_marks_the_largest_covariances() -> None:
    """Log-probs around their mean are -1.5, -0.5, 0.5 and 1.5, advantages 1, -1, -1 and
    1: covariances -1.5, 0.5, -0.5 and 1.5. Half of 4 are two, 0.002 of 4 at least one.
    """
    given = ([1.0, -1, -1, 1], [-4.0, -3, -2, -1])
    assert marked_of(algorithm("kl_cov", "algorithm.covariance_share=0.5"), *given) == [1, 3]
    assert marked_of(algorithm("kl_cov"), *given) == [3]


def test_clip_cov_draws_between_its_limits() -> None:
    """The covariances are 4, 0, 0 and 4: both ends are within 1 and 5, none within 1
    and 3.
    """
    given = ([2.0, 0, 0, -2], [-1.0, -3, -3, -5])
    share = "algorithm.covariance_share=0.5"
    assert marked_of(algorithm("clip_cov", share), *given) == [0, 3]
    assert len(marked_of(algorithm("clip_cov"), *given)) == 1
    assert marked_of(algorithm("clip_cov", "algorithm.covariance_high=3"), *given) == []


def test_clip_cov_draws_evenly() -> None:
    """A tenth of 5,000 equal candidates with many log-probs comes from everywhere."""
    random = np.random.default_rng(3)
    logprobs = np.where(np.arange(5000) % 2, -1.0, -5.0) + random.normal(0, 0.1, 5000)
    advantages = np.where(np.arange(5000) % 2, 1.5, -1.5)
    policy = algorithm("clip_cov", "algorithm.covariance_share=0.1")
    found = np.array(marked_of(policy, advantages.tolist(), logprobs.tolist()))
    assert len(found) == 500
    assert np.abs(np.bincount(found // 1000) - 100).max() < 40
    drawn = (logprobs - logprobs.mean())[found] * advantages[found]
    assert abs(drawn.mean() - 3) < 0.05


def test_opd_takes_the_teachers_opinion_of_each_token_for_its_advantage() -> None:
    """Log-probs were -1. The first token is likelier by 0.5 to the teacher, and the
    second by as much less likely. Rewards count nothing, and NaN in a prompt neither.
    """
    policy, batch = algorithm("opd"), batch_of()
    teacher = np.full(9, np.nan)
    teacher[batch["loss_mask"]] = [-0.5, -1.5, -1, -3, -1, -2]
    given = batch.with_tokens(teacher_logprobs=teacher)
    advantages = policy.advantages(given)["advantages"]
    assert advantages.tolist() == [0, 0.5, -0.5, 0, 0, 0, -2, 0, -1]

    loss, grad, metrics, weights = losses_of(
        policy, advantages=advantages, teacher_logprobs=teacher
    )
    first, second, third, fourth = exp(0.1), exp(0.5), exp(0.2), exp(0.3)
    expected = [-0.5 * first, 0.5 * second, 0, 2 * third, 0, fourth]
    assert (loss, grad) == (near(expected), near(expected))
    moved = (0.1 - 0.5) + (0.5 + 0.5) + (-0.9 + 0) + (0.2 + 2) + (-0.2 + 0) + (0.3 + 1)
    assert metrics["kl_teacher"] == pytest.approx(moved / 6)
    assert weights.tolist() == pytest.approx([1 / 6] * 6)


def test_a_teacher_beside_rewards_is_weighed_by_two_coefficients() -> None:
    policy = algorithm("opd", "algorithm.teacher_coef=0.5", "algorithm.reward_coef=2")
    batch = batch_of(teacher_logprobs=np.full(9, -1.5))
    batch = replace(batch, seqs={**batch.seqs, "group": np.zeros(3, np.int64),
                                 "reward": np.array([0, 1, 5], np.float32)})  # fmt: skip
    advantages = policy.advantages(batch)["advantages"]
    # The mean of the group is 2.
    assert advantages[[1, 4, 6]].tolist() == [2 * -2 - 0.25, 2 * -1 - 0.25, 2 * 3 - 0.25]


def test_the_constants_of_gmpo_are_those_of_its_paper() -> None:
    config = algorithm("gmpo").config
    assert log(1 + config.clip_high) == pytest.approx(0.4, abs=1e-15)
    assert log(1 - config.clip_low) == pytest.approx(-0.4, abs=1e-15)
    assert exp(-1) == pytest.approx(1 / e)
