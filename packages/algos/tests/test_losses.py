"""Losses and their gradients against hand-derived values, and what must not change
them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coupler.interfaces import Aggregation
from coupler.loop.loss_weight import loss_weight, prepare
from coupler.metrics import merge, values
from coupler.worker.train_infer import checked_loss
from coupler_algos.config import KL, Behaviour, GRPOConfig, KLEstimator, RLOOConfig, SFTConfig
from coupler_algos.grpo import GRPO
from coupler_algos.rloo import RLOO
from coupler_algos.sft import SFT
from coupler_algos.shapes import clipped_surrogate
from coupler_algos.slots import Correction, Ratio, Shape

EVERYTHING = {
    "dual_clip": 3.0,
    "entropy_coef": 0.01,
    "correction_cap": 1.5,
    "kl": KL.IN_LOSS,
    "kl_coef": 0.04,
}
ALGORITHMS = [
    GRPO(GRPOConfig()),
    GRPO(GRPOConfig(**EVERYTHING, kl_estimator=KLEstimator.K2)),
    GRPO(GRPOConfig(behaviour=Behaviour.ROLLOUT, kl=KL.NONE)),
    GRPO(GRPOConfig(aggregation=Aggregation.CONSTANT, aggregation_constant=16, kl=KL.IN_REWARD)),
    GRPO(GRPOConfig(ratio=Ratio.GEOMETRIC, kl=KL.NONE, opsm_delta=0.1)),
    GRPO(GRPOConfig(shape=Shape.DETACHED_CLIP, clip_low=0.0, clip_high=0.3, kl=KL.NONE)),
    GRPO(GRPOConfig(shape=Shape.GATE, clip_low=0.0, clip_high=0.0, kl=KL.NONE)),
    GRPO(
        GRPOConfig(
            kl=KL.NONE,
            correction_cap=2.0,
            correction=Correction.MASK,
            correction_floor=0.5,
            correction_ratio=Ratio.GEOMETRIC,
        )
    ),
    RLOO(RLOOConfig()),
    RLOO(RLOOConfig(**EVERYTHING, clip_low=0.2, clip_high=0.2)),
    SFT(SFTConfig()),
]


def logprobs_of(batch, seed: int = 1) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(0, 0.3, batch.num_tokens)
    return (batch["old_logprobs"] + noise).astype(np.float32)


RATIOS = torch.tensor([0.5, 0.8, 1.0, 1.2, 1.25, 1.5, 10.0])


@pytest.mark.parametrize(
    ("advantage", "high", "dual", "loss", "has_gradient"),
    [
        (1.0, 0.2, 0.0, [-0.5, -0.8, -1.0, -1.2, -1.2, -1.2, -1.2], [1, 1, 1, 1, 0, 0, 0]),
        (1.0, 0.28, 0.0, [-0.5, -0.8, -1.0, -1.2, -1.25, -1.28, -1.28], [1, 1, 1, 1, 1, 0, 0]),
        (1.0, 0.0, 0.0, [-0.5, -0.8, -1.0, -1.2, -1.25, -1.5, -10.0], [1, 1, 1, 1, 1, 1, 1]),
        (-1.0, 0.2, 0.0, [0.8, 0.8, 1.0, 1.2, 1.25, 1.5, 10.0], [0, 1, 1, 1, 1, 1, 1]),
        (-1.0, 0.2, 3.0, [0.8, 0.8, 1.0, 1.2, 1.25, 1.5, 3.0], [0, 1, 1, 1, 1, 1, 0]),
        (1.0, 0.0, 3.0, [-0.5, -0.8, -1.0, -1.2, -1.25, -1.5, -10.0], [1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_surrogate_and_its_gradient_by_hand(advantage, high, dual, loss, has_gradient):
    ratio = RATIOS.clone().requires_grad_()
    result = clipped_surrogate(ratio, torch.full((7,), advantage), 0.2, high, dual)
    result.sum().backward()
    torch.testing.assert_close(result.detach(), torch.tensor(loss))
    torch.testing.assert_close(ratio.grad, -advantage * torch.tensor(has_gradient).float())


def test_grpo_loss_and_gradient_by_hand(pack, run):
    """-A r + 0.1 (exp(d) - d - 1) - 0.5 H, and its derivatives, with r = 1.1 and d =
    0.3, -0.4, 0 on sampled tokens.
    """
    advantages = np.array([0, 2.0, -1.0, 0, 0.5], np.float32)
    old = np.array([0, -1.0, -2.0, 0, -0.5], np.float32)
    logprobs = old + np.float32(np.log(1.1))
    d = np.array([0, 0.3, -0.4, 0, 0.0], np.float32)
    batch = pack(
        [3, 2], [0, 0], [0, 0], advantages=advantages, old_logprobs=old, ref_logprobs=logprobs + d
    )
    entropy = np.array([7, 0.2, 0.4, 7, 0.6], np.float32)
    algorithm = GRPO(GRPOConfig(kl=KL.IN_LOSS, kl_coef=0.1, entropy_coef=0.5))
    loss, metrics, grads = run(algorithm, batch, logprobs, entropy)
    mask = batch["loss_mask"]
    expected = np.where(mask, -1.1 * advantages + 0.1 * (np.exp(d) - d - 1) - 0.5 * entropy, 0)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    weight = np.array([0, 0.25, 0.25, 0, 0.5])  # mean of the sequences' means
    np.testing.assert_allclose(
        grads["logprobs"], weight * (-1.1 * advantages + 0.1 * (1 - np.exp(d))), rtol=1e-5
    )
    np.testing.assert_allclose(grads["entropy"], -0.5 * weight)
    measured = values(metrics)
    assert measured["entropy"] == pytest.approx(0.4)
    assert measured["kl_old"] == pytest.approx(-np.log(1.1), rel=1e-5)
    assert measured["kl_ref"] == pytest.approx((np.exp(0.3) + np.exp(-0.4) - 1.9) / 3, rel=1e-4)
    assert [measured["ratio_mean"], measured["ratio_max"]] == pytest.approx([1.1, 1.1])
    assert measured["policy_loss"] == pytest.approx(-1.1 * 1.5 / 3, rel=1e-5)


def test_dr_grpo_divides_by_the_constant_only(pack, run):
    batch = pack([3, 2], [0, 0], [0, 0], advantages=np.array([0, 1, 1, 0, 1], np.float32))
    algorithm = GRPO(
        GRPOConfig(kl=KL.NONE, aggregation=Aggregation.CONSTANT, aggregation_constant=10)
    )
    _, _, grads = run(algorithm, batch, np.full(5, -1, np.float32))
    np.testing.assert_allclose(grads["logprobs"], [0, -0.05, -0.05, 0, -0.05], rtol=1e-6)


def test_clip_fractions_count_the_tokens_whose_gradient_is_cut(pack, run):
    advantages = np.array([0, 1, 1, 1, -1, -1, -1], np.float32)
    ratio = np.array([1, 1.27, 1.29, 0.5, 0.79, 0.81, 1.5], np.float32)
    batch = pack([7], [0], [0], advantages=advantages, old_logprobs=np.zeros(7, np.float32))
    algorithm = GRPO(GRPOConfig(kl=KL.NONE, clip_high=0.28, dual_clip=1.4))
    _, metrics, grads = run(algorithm, batch, np.log(ratio))
    measured = values(metrics)
    assert [measured[k] for k in ("clip_low", "clip_high", "clip_dual")] == pytest.approx(
        [1 / 6] * 3
    )
    np.testing.assert_array_equal(np.flatnonzero(grads["logprobs"].numpy() == 0), [0, 2, 4, 6])


def test_without_old_logprobs_the_ratio_is_one(pack, run):
    batch = pack([4], [0], [0], advantages=np.array([0, 1, -2, 3], np.float32))
    loss, metrics, grads = run(
        GRPO(GRPOConfig(kl=KL.NONE)), batch, np.array([-9, -1, -2, -3], np.float32)
    )
    np.testing.assert_array_equal(loss, [0, -1, 2, -3])
    np.testing.assert_allclose(grads["logprobs"], [0, -1 / 3, 2 / 3, -1], rtol=1e-6)
    assert values(metrics)["ratio_max"] == 1


def test_behaviour_says_whose_logprobs_divide(pack, run):
    old, rollout = np.full(2, -1, np.float32), np.full(2, np.log(0.5), np.float32)
    batch = pack(
        [2], [0], [0], advantages=np.ones(2, np.float32), old_logprobs=old, rollout_logprobs=rollout
    )
    logprobs = np.full(2, np.log(0.55), np.float32)
    for behaviour, ratio in ((Behaviour.RECOMPUTED, 0.55 * np.e), (Behaviour.ROLLOUT, 1.1)):
        loss, _, _ = run(
            GRPO(GRPOConfig(kl=KL.NONE, clip_high=0.9, behaviour=behaviour)), batch, logprobs
        )
        assert loss[1] == pytest.approx(-ratio, rel=1e-5)


def test_correction_weighs_by_the_truncated_ratio_of_recomputed_to_rollout(pack, run):
    rollout = np.log(np.array([1, 0.5, 0.1], np.float32))
    batch = pack([3], [0], [0], advantages=np.ones(3, np.float32), rollout_logprobs=rollout)
    # weights 0.8, and 4 cut to 2
    logprobs = np.log(np.array([1, 0.4, 0.4], np.float32))
    _, metrics, grads = run(GRPO(GRPOConfig(kl=KL.NONE, correction_cap=2.0)), batch, logprobs)
    np.testing.assert_allclose(grads["logprobs"], [0, -0.4, -1.0], rtol=1e-5)
    assert values(metrics)["correction_capped"] == 0.5


@pytest.mark.parametrize("cap", [0.0, 1.2])
def test_rloo_has_the_gradient_of_one_loss_per_sequence(random_batch, run, cap):
    """mean over sequences of -w_i A_i p(y_i) / p_old(y_i), differentiated by autograd,
    w_i the truncated correction.
    """
    algorithm = RLOO(RLOOConfig(kl=KL.NONE, correction_cap=cap))
    batch = algorithm.advantages(random_batch)
    logprobs = logprobs_of(batch)
    _, _, grads = run(algorithm, batch, logprobs)
    free = torch.tensor(logprobs, requires_grad=True)
    total = torch.zeros(())
    mask = torch.from_numpy(batch["loss_mask"])
    old, rollout = (torch.from_numpy(batch[name]) for name in ("old_logprobs", "rollout_logprobs"))
    valid = 0
    for start, stop in zip(batch.starts[:-1], batch.starts[1:], strict=True):
        row = torch.arange(start, stop)[mask[start:stop]]
        valid += len(row) > 0
        if len(row):
            weight = (old[row] - rollout[row]).sum().exp().clamp(max=cap) if cap else 1.0
            total = (
                total - weight * batch["advantages"][row[0]] * (free[row] - old[row]).sum().exp()
            )
    (total / valid).backward()
    torch.testing.assert_close(grads["logprobs"], free.grad, rtol=1e-4, atol=1e-6)
    assert grads["logprobs"].abs().max() > 0.01


def test_rloo_on_policy_is_reinforce(pack, run):
    batch = pack([3, 2], [0, 0], [0, 0], advantages=np.array([0, 2, 2, 0, -1], np.float32))
    _, _, grads = run(RLOO(RLOOConfig(kl=KL.NONE)), batch, np.full(5, -3, np.float32))
    np.testing.assert_array_equal(grads["logprobs"], [0, -1, -1, 0, 0.5])


@pytest.mark.parametrize(
    "aggregation", [Aggregation.SEQUENCE_MEAN_TOKEN_SUM, Aggregation.TOKEN_MEAN]
)
def test_the_metric_loss_of_rloo_is_its_objective(random_batch, columns, aggregation):
    """A completion counts once, however many tokens it has: the mean of -A p(y) /
    p_old(y), plus KL per token.
    """
    algorithm = RLOO(
        RLOOConfig(kl=KL.IN_LOSS, kl_coef=0.1, kl_estimator=KLEstimator.K2, aggregation=aggregation)
    )
    batch = prepare(algorithm.advantages(random_batch), algorithm)
    now = np.where(batch["loss_mask"], logprobs_of(batch), 0)
    out = {"logprobs": torch.from_numpy(now), "entropy": torch.ones(batch.num_tokens)}
    _, metrics = checked_loss(algorithm, None)(out, columns(batch))
    ratios = np.exp(batch.sum_by_sequence(now - batch["old_logprobs"]))
    kl = batch.sum_by_sequence((now - batch["ref_logprobs"]) ** 2 / 2)
    valid = batch.sum_by_sequence(batch["loss_mask"])
    per_sequence = -batch["advantages"][batch.starts[1:] - 1] * ratios + 0.1 * kl
    divisor = (
        (valid > 0).sum() if aggregation is Aggregation.SEQUENCE_MEAN_TOKEN_SUM else valid.sum()
    )
    assert values(metrics)["loss"] == pytest.approx(
        per_sequence[valid > 0].sum() / divisor, rel=1e-5
    )


def test_rloo_clips_whole_sequences(pack, run):
    """Token ratios 1.1 stay inside 0.2 each, their product 1.331 does not."""
    advantages = np.array([0, 1, 1, 1, 0, 1], np.float32)
    batch = pack(
        [4, 2], [0, 0], [0, 0], advantages=advantages, old_logprobs=np.zeros(6, np.float32)
    )
    algorithm = RLOO(RLOOConfig(kl=KL.NONE, clip_low=0.2, clip_high=0.2))
    _, metrics, grads = run(algorithm, batch, np.full(6, np.log(1.1), np.float32))
    np.testing.assert_allclose(grads["logprobs"], [0, 0, 0, 0, 0, -0.55], rtol=1e-5)
    assert values(metrics)["clip_high"] == 0.75


def test_sft_is_the_mean_negative_log_likelihood(pack, run):
    batch = pack([3, 2], [0, 0], [0, 0])
    loss, metrics, grads = run(SFT(SFTConfig()), batch, np.array([9, -1, -2, 9, -6], np.float32))
    np.testing.assert_array_equal(loss, [0, 1, 2, 0, 6])
    np.testing.assert_allclose(grads["logprobs"], [0, -1 / 3, -1 / 3, 0, -1 / 3], rtol=1e-6)
    assert values(metrics) == {"nll": 3.0}


def test_sft_divides_by_the_constant_only(pack, run):
    algorithm = SFT(SFTConfig(aggregation=Aggregation.CONSTANT, aggregation_constant=10))
    _, _, grads = run(
        algorithm, pack([3, 2], [0, 0], [0, 0]), np.array([9, -1, -2, 9, -6], np.float32)
    )
    np.testing.assert_allclose(grads["logprobs"], [0, -0.05, -0.05, 0, -0.05], rtol=1e-6)


def test_extreme_logprobs_keep_loss_and_gradient_finite(pack, run):
    batch = pack(
        [3],
        [0],
        [0],
        advantages=np.array([0, -1, -1], np.float32),
        old_logprobs=np.array([0, -1e4, 0], "f4"),
    )
    loss, _, grads = run(
        GRPO(GRPOConfig(kl=KL.NONE, clip_high=0.0)), batch, np.array([0, 0, -1e4], np.float32)
    )
    assert loss.isfinite().all()
    assert loss[1] == pytest.approx(np.exp(20), rel=1e-5)
    np.testing.assert_array_equal(grads["logprobs"], np.zeros(3))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nan_under_the_mask_changes_no_bit(random_batch, run, algorithm):
    clean = algorithm.advantages(random_batch)
    logprobs, entropy = logprobs_of(clean), np.ones(clean.num_tokens, np.float32)
    mask = clean["loss_mask"]
    poison = {
        n: np.where(mask, c, np.nan).astype("f4")
        for n, c in clean.tokens.items()
        if c.dtype.kind == "f"
    }
    expected = run(algorithm, clean, logprobs, entropy)
    actual = run(
        algorithm,
        clean.with_tokens(**poison),
        np.where(mask, logprobs, np.nan).astype("f4"),
        np.where(mask, entropy, np.nan).astype("f4"),
    )
    assert torch.equal(actual[0], expected[0])
    assert values(actual[1]) == values(expected[1])
    assert torch.equal(actual[2]["logprobs"], expected[2]["logprobs"])
    masked = torch.from_numpy(~mask)
    assert not expected[0][masked].any() and not expected[2]["logprobs"][masked].any()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_micro_batches_and_row_order_change_neither_loss_nor_metrics(random_batch, run, algorithm):
    batch = algorithm.advantages(random_batch)
    batch = batch.with_tokens(now=logprobs_of(batch))
    whole, metrics, _ = run(algorithm, batch, batch["now"])
    batch = batch.with_tokens(expected=whole.numpy())
    parts = []
    for rows in ([3, 0], [6, 1, 2], [], [5, 4]):
        part = batch.take(rows)
        loss, measured, _ = run(algorithm, part, part["now"])
        np.testing.assert_array_equal(loss, part["expected"])
        parts.append(measured)
    assert values(merge(parts)) == pytest.approx(values(metrics), rel=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_gradient_reaches_the_entropy_without_a_bonus(random_batch, run, algorithm):
    batch = algorithm.advantages(random_batch)
    _, _, grads = run(algorithm, batch, logprobs_of(batch))
    weight = loss_weight(batch, algorithm.aggregation, algorithm.constant)
    coefficient = 0.0 if isinstance(algorithm, SFT) else algorithm.config.entropy_coef
    if coefficient:
        np.testing.assert_allclose(grads["entropy"], -coefficient * weight, rtol=1e-6)
    else:
        assert grads["entropy"] is None
