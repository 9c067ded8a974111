"""Ratios, shapes, baselines and corrections beyond GRPO's own, against values worked
out by hand.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coupler.errors import CouplerError
from coupler.metrics import values
from coupler_algos.config import KL, GRPOConfig
from coupler_algos.grpo import GRPO
from coupler_algos.shapes import detached_clip, gamma_kernel, gate
from coupler_algos.slots import Baseline, Correction, Ratio, Shape


def grpo(**changes) -> GRPO:
    plain = {"kl": KL.NONE, "clip_low": 0.0, "clip_high": 0.0}
    return GRPO(GRPOConfig(**{**plain, **changes}))


def double(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def moved(pack):
    """Two sequences of 3 and 1 sampled tokens with advantages 2 and -1, whose log-probs
    moved by 0.1, 0.2, 0.6 (mean 0.3) and -0.5.
    """
    advantages = np.array([0, 2, 2, 2, 0, -1], np.float32)
    batch = pack(
        [4, 2],
        [0, 0],
        [0, 0],
        advantages=advantages,
        old_logprobs=np.full(6, -1, np.float32),
        rollout_logprobs=np.full(6, -1, np.float32),
    )
    return batch, np.float32(-1) + np.array([0, 0.1, 0.2, 0.6, 0, -0.5], np.float32)


# --- ratios


def test_gspo_has_the_geometric_mean_for_its_ratio(moved, run):
    """Eq. 5 and 7: -A s and its derivative -A s / m, over two sequences."""
    loss, metrics, grads = run(grpo(ratio=Ratio.GEOMETRIC), *moved)
    first, second = np.exp(0.3), np.exp(-0.5)
    np.testing.assert_allclose(loss, [0, *[-2 * first] * 3, 0, second], rtol=1e-6)
    np.testing.assert_allclose(
        grads["logprobs"],
        [0, *[-2 * first / 3 / 2] * 3, 0, second / 2],
        rtol=1e-6,
    )
    assert values(metrics)["ratio_max"] == pytest.approx(first, rel=1e-6)


def test_gspo_clips_whole_sequences(moved, run):
    """s = 1.35 and 0.61 are outside of 0.3 each, on the side that their sign cuts."""
    loss, metrics, grads = run(grpo(ratio=Ratio.GEOMETRIC, clip_low=0.3, clip_high=0.3), *moved)
    np.testing.assert_allclose(loss, [0, -2.6, -2.6, -2.6, 0, 0.7], rtol=1e-6)
    assert not grads["logprobs"].any()
    assert [values(metrics)[k] for k in ("clip_high", "clip_low")] == [0.75, 0.25]


def test_grpo_may_have_the_product_for_its_ratio(moved, run):
    """-A exp(sum d), once for each sequence: an equal part on each of its tokens."""
    loss, _, grads = run(grpo(ratio=Ratio.SEQUENCE), *moved)
    np.testing.assert_allclose(loss, [0, *[-2 * np.exp(0.9) / 3] * 3, 0, np.exp(-0.5)], rtol=1e-6)
    np.testing.assert_allclose(
        grads["logprobs"],
        [0, *[-2 * np.exp(0.9) / 3 / 2] * 3, 0, np.exp(-0.5) / 2],
        rtol=1e-6,
    )


# --- shapes


def test_cispo_by_hand():
    """-A clip(r) log p: the weight is cut, and no token loses its gradient."""
    logprobs = double(-1.0, -2.0, -3.0, -0.5)
    ratio = (logprobs - double(-1.5, -1.0, -3.0, -2.0).detach()).exp()
    advantages = double(2.0, 2.0, -1.0, -1.0).detach()
    loss = detached_clip(ratio, advantages, logprobs, 0.5, 0.3)
    loss.sum().backward()

    weights = [1.3, 0.5, 1.0, 1.3]
    torch.testing.assert_close(
        loss.detach(),
        double(2 * 1.3 * 1.0, 2 * 0.5 * 2.0, -1.0 * 3.0, -1.3 * 0.5).detach(),
    )
    want = [-a * w for a, w in zip((2, 2, -1, -1), weights, strict=True)]
    torch.testing.assert_close(logprobs.grad, double(*want).detach())


def test_cispo_counts_what_it_cuts_on_both_sides(moved, run):
    config = {"shape": Shape.DETACHED_CLIP, "clip_low": 0.3, "clip_high": 0.3}
    _, metrics, grads = run(grpo(**config), *moved)
    # ratios 1.105, 1.221, 1.822 and 0.607
    assert [values(metrics)[k] for k in ("clip_high", "clip_low")] == [0.25, 0.25]
    weights = np.array([0, np.exp(0.1), np.exp(0.2), 1.3, 0, 0.7])
    share = np.array([0, 1 / 6, 1 / 6, 1 / 6, 0, 1 / 2])
    want = -moved[0]["advantages"] * weights * share
    np.testing.assert_allclose(grads["logprobs"], want, rtol=1e-6)


def test_sapo_by_hand():
    """4 / tau * sigmoid(tau (r - 1)), whose slope at r = 1 is 1 for any tau."""
    ratio = double(1.0, 1.0, 2.0, 0.5)
    loss = gate(ratio, double(3.0, -3.0, 1.0, -1.0).detach(), 1.0, 2.0)
    loss.sum().backward()

    up, down = 1 / (1 + np.exp(-1.0)), 1 / (1 + np.exp(1.0))
    torch.testing.assert_close(
        loss.detach(),
        double(-3 * 2.0, 3 * 1.0, -4 * up, 2 * down).detach(),
    )
    want = double(-3.0, 3.0, -4 * up * (1 - up), 4 * down * (1 - down)).detach()
    torch.testing.assert_close(ratio.grad, want)


def test_sapo_in_a_step(moved, run):
    loss, _, _ = run(grpo(shape=Shape.GATE, gate_positive=1.0, gate_negative=1.05), *moved)
    ratio = np.exp([0.1, 0.2, 0.6])
    want = [*(-2 * 4 / (1 + np.exp(1 - ratio))), 4 / 1.05 / (1 + np.exp(1.05 * (1 - np.exp(-0.5))))]
    np.testing.assert_allclose(loss[[1, 2, 3, 5]], want, rtol=1e-6)


def test_a_kernel_of_any_power_is_a_number_at_the_largest_ratio():
    """A ratio is at most exp(20), whose fifth power has no float32."""
    ratios = torch.tensor([20.0, -1.0]).exp()
    loss = gamma_kernel(ratios, torch.ones(2), -torch.ones(2), (5.0, 3.0), (3.0, 2.0))
    assert loss.tolist() == pytest.approx([0.0, np.exp(-5 + 3 * (1 - np.exp(-1)))], rel=1e-6)


# --- advantages


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # 4 sampled tokens with reward 1, 1 with reward 0 and 3 with reward 1: 7 / 8
        ({"baseline": Baseline.LENGTH_WEIGHTED}, [1 / 8, -7 / 8, 1 / 8]),
        # the mean is 2 / 3: (1 - 2/3) / (2/3)
        ({"scale_by_mean": True}, [0.5, -1.0, 0.5]),
    ],
)
def test_baselines_and_scales_by_hand(pack, changes, expected):
    batch = pack([5, 2, 4], [1.0, 0.0, 1.0], [3, 3, 3])
    found = grpo(scale_by_std=False, **changes).advantages(batch)["advantages"]
    np.testing.assert_allclose(found[batch.starts[1:] - 1], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("rewards", "changes"),
    [
        ([1.0, -1.0, 0.0], {}),
        ([-1.0, -3.0, 0.0], {}),
        ([0.0, 0.0, 0.0], {"overlong_buffer_tokens": 2, "overlong_max_tokens": 4}),
    ],
)
def test_a_mean_that_is_not_above_0_scales_nothing(pack, rewards, changes):
    batch = pack([5, 2, 4], rewards, [3, 3, 3])
    algorithm = grpo(scale_by_std=False, scale_by_mean=True, **changes)
    assert not algorithm.advantages(batch)["advantages"].any()


def test_whitening_is_over_the_tokens_of_a_batch(pack):
    """Centred rewards, 0.5 on 3 tokens and -0.5 on 1: mean 0.25, std sqrt(3) / 4."""
    batch = pack([4, 2], [1.0, 0.0], [0, 0])
    found = grpo(scale_by_std=False, whiten=True).advantages(batch)["advantages"]
    up, down = 0.25 / (3**0.5 / 4), -0.75 / (3**0.5 / 4)
    np.testing.assert_allclose(found, [0, up, up, up, 0, down], rtol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [{"baseline": Baseline.LENGTH_WEIGHTED}, {"scale_by_mean": True}, {"whiten": True}],
)
def test_equal_rewards_teach_nothing_and_one_sample_is_an_error(pack, changes):
    algorithm = grpo(scale_by_std=False, **changes)
    for reward in (0.0, 0.1):
        batch = pack([2, 3, 4], [0.0] * 3, [0] * 3).with_seqs(reward=np.full(3, reward))
        assert not algorithm.advantages(batch)["advantages"].any()
    with pytest.raises(CouplerError, match="one sample"):
        algorithm.advantages(pack([2, 2, 2], [1.0, 0.0, 1.0], [3, 3, 4]))


def test_a_group_that_sampled_nothing_has_its_plain_mean(pack):
    batch = pack([1, 1], [1.0, 0.0], [0, 0])
    algorithm = grpo(scale_by_std=False, baseline=Baseline.LENGTH_WEIGHTED)
    assert np.isfinite(algorithm.advantages(batch)["advantages"]).all()


# --- corrections


@pytest.mark.parametrize(
    ("changes", "weights", "metric", "share"),
    [
        # w = 0.5, 2, 4 and 3 of the tokens
        ({"correction_cap": 2.5}, [0.5, 2, 2.5, 2.5], "correction_capped", 0.5),
        (
            {"correction_cap": 3.5, "correction": Correction.MASK, "correction_floor": 0.75},
            [0, 2, 0, 3],
            "correction_masked",
            0.5,
        ),
        # of the sequences 4 and 3; their geometric means 1.587 and 3
        (
            {"correction_cap": 3.5, "correction_ratio": Ratio.SEQUENCE},
            [3.5, 3.5, 3.5, 3],
            "correction_capped",
            0.75,
        ),
        (
            {
                "correction_cap": 2.0,
                "correction": Correction.MASK,
                "correction_ratio": Ratio.GEOMETRIC,
            },
            [4 ** (1 / 3)] * 3 + [0],
            "correction_masked",
            0.25,
        ),
    ],
    ids=["truncated", "icepop", "sequences", "masked sequences"],
)
def test_corrections_by_hand(pack, run, changes, weights, metric, share):
    rollout = -np.log(np.array([1, 0.5, 2, 4, 1, 3], np.float32)) - 1
    batch = pack(
        [4, 2],
        [0, 0],
        [0, 0],
        advantages=np.array([0, 1, 1, 1, 0, 1], np.float32),
        rollout_logprobs=rollout,
    )
    loss, metrics, _ = run(grpo(**changes), batch, np.full(6, -1, np.float32))
    np.testing.assert_allclose(-loss[[1, 2, 3, 5]], weights, rtol=1e-5)
    assert values(metrics)[metric] == share


def test_opsm_drops_sequences_that_became_unlikely_for_a_bad_reason(pack, run):
    """Only with A < 0, and only where the mean log-prob fell by more than delta."""
    advantages = np.array([0, -1, -1, 0, -1, 0, 1], np.float32)
    batch = pack(
        [3, 2, 2],
        [0] * 3,
        [0] * 3,
        advantages=advantages,
        old_logprobs=np.full(7, -1, np.float32),
    )
    now = np.array([0, -1.9, -1.3, 0, -1.4, 0, -3], np.float32)  # means 0.6, 0.4 and 2 lower
    loss, metrics, grads = run(grpo(opsm_delta=0.5), batch, now)
    assert loss[[1, 2]].tolist() == [0, 0] and not grads["logprobs"][[1, 2]].any()
    assert loss[4] > 0 > loss[6]
    assert values(metrics)["opsm_masked"] == 0.5
