"""GAE, the rewards of tokens, PPO's two losses and the KL controller, against values
worked out by hand.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from coupler.batch import Batch
from coupler.loop.loss_weight import loss_weight, prepare
from coupler.metrics import values as read
from coupler_algos import gae
from coupler_algos.config import KL, GRPOConfig, KLEstimator, PPOConfig
from coupler_algos.grpo import GRPO
from coupler_algos.ppo import PPO, ValueLoss, token_rewards


def ppo(**settings) -> PPO:
    return PPO(PPOConfig(**{"kl": KL.NONE, "whiten": False, **settings}))


def column(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


# --- advantages


def test_gae_by_hand(pack):
    """gamma = 0.5, lam = 0.5, so each delta counts a quarter one token earlier.

    Sequence 1: V = 1, 2, 3, rewards 0, 0, 8: delta = 0.5 * 2 - 1 = 0, 0.5 * 3 - 2 =
    -0.5 and 8 - 3 = 5; A = 5, then -0.5 + 5 / 4 = 0.75, then 0 + 0.75 / 4 = 0.1875.
    Sequence 2: V = 4, reward 1: A = -3.
    """
    batch = pack([4, 2], [8, 1], [0, 0], values=column(9, 1, 2, 3, 9, 4))
    done = ppo(gamma=0.5, lam=0.5).advantages(batch)
    np.testing.assert_array_equal(done["advantages"], column(0, 0.1875, 0.75, 5, 0, -3))
    np.testing.assert_array_equal(done["returns"], column(0, 1.1875, 2.75, 8, 0, 1))


def test_an_observation_is_no_step(pack):
    """The sequence of the test above with two observed tokens inside and one at the
    end: the same numbers.
    """
    batch = pack([7], [8], [0], values=column(9, 1, 77, 2, -77, 3, 77))
    batch = batch.with_tokens(loss_mask=np.array([0, 1, 0, 1, 0, 1, 0], bool))
    done = ppo(gamma=0.5, lam=0.5).advantages(batch)
    np.testing.assert_array_equal(done["advantages"], column(0, 0.1875, 0, 0.75, 0, 5, 0))
    np.testing.assert_array_equal(done["returns"], column(0, 1.1875, 0, 2.75, 0, 8, 0))


@pytest.mark.parametrize(("lam", "expected"), [(1.0, [0.5, 1.5, 0.5]), (0.0, [-1.0, 1.0, 0.5])])
def test_lam_is_between_returns_minus_values_and_one_step(pack, lam, expected):
    """V = 1, 0, 1, reward 1.5, no discount. lam=1: 1.5 - V; lam=0: delta = -1, 1,
    0.5.
    """
    batch = pack([4], [1.5], [0], values=column(0, 1, 0, 1))
    np.testing.assert_allclose(
        ppo(lam=lam).advantages(batch)["advantages"][1:], expected, rtol=1e-6
    )


def test_gae_equals_its_sum(random_batch):
    """Eq. 16 as it is written: the sum over l of (gamma lam)^l delta_{t+l}, on
    sequences with gaps in the mask.
    """
    rng = np.random.default_rng(3)
    mask = random_batch["loss_mask"] & (rng.random(random_batch.num_tokens) < 0.7)
    batch = random_batch.with_tokens(loss_mask=mask)
    rewards, v = rng.normal(size=(2, batch.num_tokens))
    gamma, lam = 0.9, 0.8
    got = gae.estimate(batch, rewards, v, gamma, lam)
    expected = np.zeros(batch.num_tokens)
    for start, stop in zip(batch.starts[:-1], batch.starts[1:], strict=True):
        rows = start + np.flatnonzero(mask[start:stop])
        delta = [
            rewards[t] + gamma * (v[n] if n >= 0 else 0) - v[t]
            for t, n in zip(rows, [*rows[1:], -1], strict=False)
        ]
        for i, t in enumerate(rows):
            expected[t] = sum((gamma * lam) ** k * d for k, d in enumerate(delta[i:]))
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_whitening_is_over_valid_tokens_and_leaves_returns_alone(pack):
    """lam=1: A = 1, 3 on one sequence and -4, 0 on the other; mean 0, variance 26 /
    4.
    """
    batch = pack([3, 3], [3, 0], [0, 0], values=column(50, 2, 0, 50, 4, 0))
    plain, white = ppo(lam=1.0).advantages(batch), ppo(lam=1.0, whiten=True).advantages(batch)
    np.testing.assert_array_equal(plain["advantages"], column(0, 1, 3, 0, -4, 0))
    np.testing.assert_allclose(white["advantages"], plain["advantages"] / np.sqrt(6.5), rtol=1e-6)
    np.testing.assert_array_equal(white["returns"], plain["returns"])


def test_masked_tokens_change_nothing(random_batch):
    """Neither NaN under the mask nor tokens inserted there reach an advantage, a return
    or a loss weight.
    """
    config = {"kl": KL.IN_REWARD, "kl_coef": 0.1, "whiten": True}
    batch = random_batch.with_tokens(
        values=np.cos(np.arange(random_batch.num_tokens)).astype(np.float32)
    )
    clean = ppo(**config).advantages(batch)
    mask = batch["loss_mask"]
    dirt = {
        n: np.where(mask, c, np.nan).astype("f4")
        for n, c in batch.tokens.items()
        if c.dtype.kind == "f"
    }
    dirty = ppo(**config).advantages(batch.with_tokens(**dirt))
    for name in ("advantages", "returns"):
        np.testing.assert_array_equal(dirty[name], clean[name], err_msg=name)
        assert np.isfinite(clean[name]).all() and not clean[name][~mask].any()


def test_a_batch_without_valid_tokens_has_no_advantages(pack):
    batch = pack([2, 1], [1, 1], [0, 0], values=column(1, 1, 1))
    batch = batch.with_tokens(loss_mask=np.zeros(3, bool))
    done = ppo(whiten=True).advantages(batch)
    assert not done["advantages"].any() and not done["returns"].any()


def test_the_reward_stands_at_the_last_sampled_token(pack):
    """Behind an observation, and nowhere in a sequence where nothing was sampled."""
    batch = pack([4, 2, 3], [8, 5, 2], [0, 0, 0], values=np.zeros(9, np.float32))
    batch = batch.with_tokens(loss_mask=np.array([0, 1, 1, 0, 0, 0, 0, 0, 1], bool))
    np.testing.assert_array_equal(token_rewards(ppo().config, batch), [0, 0, 8, 0, 0, 0, 0, 0, 2])


def test_rewards_of_tokens_replace_the_sequence_reward(pack):
    batch = pack([3, 2], [8, 5], [0, 0], token_reward=column(7, 1, 2, 7, -1))
    np.testing.assert_array_equal(token_rewards(ppo().config, batch), [0, 1, 2, 0, -1])


def test_kl_and_length_in_the_reward(pack):
    """k1 = log p - log ref = 0.5, -0.25 and 1; beta = 0.1. Two sampled tokens of at
    most 2, buffer 2: -1 in all.
    """
    batch = pack(
        [3, 2],
        [1, 1],
        [0, 0],
        old_logprobs=column(9, -1, -2, 9, -3),
        ref_logprobs=column(9, -1.5, -1.75, 9, -4),
    )
    config = {
        "kl": KL.IN_REWARD,
        "kl_coef": 0.1,
        "overlong_buffer_tokens": 2,
        "overlong_max_tokens": 2,
    }
    expected = [0, -0.05, 1 + 0.025 - 1, 0, 1 - 0.1 - 0.5]
    np.testing.assert_allclose(token_rewards(ppo(**config).config, batch), expected, rtol=1e-6)


# --- losses


@pytest.fixture
def run_critic(columns):
    """(config, batch, values) -> token loss, its metrics, and the gradient of the
    step's loss by the values.
    """

    def compute(config, batch, values):
        critic = ValueLoss(config)
        free = torch.tensor(values, requires_grad=True)
        loss, metrics = critic.loss({"values": free}, columns(batch))
        (
            loss * torch.from_numpy(loss_weight(batch, critic.aggregation, critic.constant))
        ).sum().backward()
        return loss.detach().numpy(), read(metrics), free.grad.numpy()

    return compute


def test_value_loss_by_hand(pack, run_critic):
    """old = 0, clip 0.5: inside, beyond towards the return, beyond away from it, and
    past it on the far side.

    v, G = 0.25, 1: (0.75)^2 / 2.  v, G = 0.75, 1: the clipped 0.5 is farther, 0.5^2 /
    2, no gradient. v, G = -1, 1: 2^2 / 2, gradient -2.  v, G = 3, 0: 3^2 / 2 and not
    the clipped 0.5^2 / 2.
    """
    batch = pack([5], [0], [0], values=np.zeros(5, np.float32), returns=column(9, 1, 1, 1, 0))
    values = column(9, 0.25, 0.75, -1, 3)
    loss, metrics, grad = run_critic(PPOConfig(value_clip=0.5), batch, values)
    np.testing.assert_allclose(loss, [0, 0.28125, 0.125, 2, 4.5])
    np.testing.assert_allclose(grad, np.array([0, -0.75, 0, -2, 3]) / 4)
    assert metrics == pytest.approx(
        {"clip_fraction": 0.25, "value_loss": (0.28125 + 0.125 + 2 + 4.5) / 4}
    )
    loss, metrics, grad = run_critic(PPOConfig(value_clip=0.0), batch, values)
    np.testing.assert_allclose(loss, [0, 0.28125, 0.03125, 2, 4.5])
    np.testing.assert_allclose(grad, np.array([0, -0.75, -0.25, -2, 3]) / 4)
    assert "clip_fraction" not in metrics


def test_rounding_is_no_clipping(pack, run_critic):
    """Values that moved less than the limit count nowhere, however ``old + (v - old)``
    rounds.
    """
    rng = np.random.default_rng(8)
    old, returns = rng.normal(0, 0.1, (2, 1000)).astype(np.float32)
    now = (old + rng.uniform(-0.19, 0.19, 1000)).astype(np.float32)
    batch = pack([1000], [0], [0], values=old, returns=returns)
    assert run_critic(PPOConfig(value_clip=0.2), batch, now)[1]["clip_fraction"] == 0.0


def test_value_gradient_equals_autograd_of_the_formula(random_batch, run_critic):
    rng = np.random.default_rng(5)
    old, returns, now = rng.normal(0, 0.3, (3, random_batch.num_tokens)).astype(np.float32)
    batch = random_batch.with_tokens(values=old, returns=returns)
    _, _, grad = run_critic(PPOConfig(), batch, now)
    v, o, g = (torch.tensor(c, dtype=torch.float64) for c in (now, old, returns))
    v.requires_grad_()
    per_token = torch.max((v - g) ** 2, (torch.max(torch.min(v, o + 0.2), o - 0.2) - g) ** 2) / 2
    per_token[torch.from_numpy(batch["loss_mask"])].mean().backward()
    np.testing.assert_allclose(grad, v.grad.numpy(), rtol=1e-5, atol=1e-7)
    assert (grad != 0).sum() > 3


def test_policy_gradient_equals_autograd_of_the_formula(random_batch, run):
    """Clipped, dual-clipped surrogate with PPO's advantages, every token on its own
    ratio, token mean.
    """
    algorithm = ppo(kl=KL.IN_REWARD, whiten=True, dual_clip=1.5)
    now_values = np.sin(np.arange(random_batch.num_tokens)).astype(np.float32)
    batch = prepare(algorithm.advantages(random_batch.with_tokens(values=now_values)), algorithm)
    now = (
        batch["old_logprobs"] + np.random.default_rng(6).normal(0, 0.5, batch.num_tokens)
    ).astype(np.float32)
    _, metrics, grads = run(algorithm, batch, now)
    mask = torch.from_numpy(batch["loss_mask"])
    free = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    old, a = (torch.tensor(batch[n], dtype=torch.float64) for n in ("old_logprobs", "advantages"))
    ratio = (free - old).exp()
    loss = -torch.min(ratio * a, torch.clamp(ratio, 0.8, 1.2) * a)
    loss = torch.where(a < 0, torch.min(loss, -1.5 * a), loss)
    loss[mask].mean().backward()
    np.testing.assert_allclose(grads["logprobs"], free.grad.numpy(), rtol=1e-4, atol=1e-6)
    measured = read(metrics)
    assert {"clip_low", "clip_high", "clip_dual"} <= measured.keys()
    assert sum(measured[k] for k in ("clip_low", "clip_high")) > 0


# --- the controller


def drifted(pack, *kl: float):
    """One sequence per number: two sampled tokens whose k1 adds up to it."""
    halves = np.concatenate([column(9, d / 2, d / 2) for d in kl])
    zeros = np.zeros(3 * len(kl), np.float32)
    return pack(
        [3] * len(kl), [0.0] * len(kl), [0] * len(kl), old_logprobs=halves, ref_logprobs=zeros
    )


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        # 10 % above the target, two trajectories, horizon 10
        ((6.6, 6.6), 1 + 0.1 * 2 / 10),
        ((3.0, 10.2), 1 + 0.1 * 2 / 10),  # the same mean
        ((36.0,), 1 + 0.2 / 10),  # far above: the error is cut at 0.2
        ((0.0,), 1 - 0.2 / 10),
        ((-30.0,), 1 - 0.2 / 10),
        ((6.0,), 1.0),
    ],
)
def test_adaptive_kl_by_hand(pack, kl, factor):
    controller = ppo(kl=KL.IN_REWARD, kl_coef=0.5, kl_target=6.0, kl_horizon=10).controller()
    batch = controller.apply(drifted(pack, *kl))
    np.testing.assert_array_equal(batch["kl_coef"], np.full(len(kl), 0.5, np.float32))
    assert read(controller.update(batch)) == pytest.approx(
        {"kl/coef": 0.5, "kl/trajectory": np.mean(kl)}, rel=1e-6
    )
    assert controller.state()["value"] == pytest.approx(0.5 * factor, rel=1e-6)


def test_the_coefficient_in_force_is_the_one_of_reward_and_loss(pack, run):
    settings = {"kl_coef": 0.5, "kl_target": 6.0}
    batch = drifted(pack, 6.0).with_seqs(kl_coef=np.full(1, 0.25, np.float32))
    np.testing.assert_allclose(
        token_rewards(ppo(kl=KL.IN_REWARD, **settings).config, batch), [0, -0.75, -0.75]
    )
    in_loss = batch.with_tokens(advantages=np.zeros(3, np.float32))
    plain = Batch(batch.lengths, in_loss.tokens, {})
    grads = []
    for coefficient, given in ((0.5, in_loss), (0.25, plain)):
        algorithm = GRPO(
            GRPOConfig(kl=KL.IN_LOSS, kl_coef=coefficient, kl_estimator=KLEstimator.K2)
        )
        _, _, found = run(algorithm, given, batch["old_logprobs"])
        grads.append(found["logprobs"].numpy())
    np.testing.assert_allclose(grads[0], grads[1])
    assert grads[0].any()


def test_a_controller_continues_from_its_state(pack):
    algorithm = ppo(kl=KL.IN_REWARD, kl_coef=0.5, kl_target=6.0, kl_horizon=10)
    first, second = algorithm.controller(), algorithm.controller()
    first.update(drifted(pack, 36.0))
    second.restore(json.loads(json.dumps(first.state())))
    for controller in (first, second):
        controller.update(drifted(pack, 0.0))
    assert first.state() == second.state() != algorithm.controller().state()


def test_without_a_target_nothing_is_controlled():
    assert ppo(kl=KL.IN_REWARD).controller() is None
    assert GRPO(GRPOConfig(kl_target=1.0)).controller() is not None
