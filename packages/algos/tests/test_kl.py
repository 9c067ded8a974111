"""What each estimator estimates, by exact enumeration over a small categorical."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coupler_algos.config import KLEstimator
from coupler_algos.kl import estimate

K1, K2, K3 = KLEstimator


@pytest.fixture
def policy() -> torch.Tensor:
    return torch.tensor([0.3, -1.2, 0.8, 0.1], dtype=torch.float64, requires_grad=True)


REFERENCE = torch.log_softmax(torch.tensor([-0.4, 0.5, 0.9, -0.7], dtype=torch.float64), 0)


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum()


def gradient(value: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    (grad,) = torch.autograd.grad(value, logits)
    return grad


@pytest.mark.parametrize(("estimator", "unbiased"), [(K1, True), (K2, False), (K3, True)])
def test_expected_value(policy, estimator, unbiased):
    logprobs = torch.log_softmax(policy, 0)
    expected = (logprobs.exp() * estimate(estimator, logprobs, REFERENCE, torch)).sum()
    assert torch.isclose(expected, divergence(logprobs, REFERENCE), rtol=1e-12) == unbiased


@pytest.mark.parametrize("estimator", KLEstimator)
def test_gradient_as_a_loss_term(policy, estimator):
    """Tokens are drawn without gradient, then the estimate is differentiated: what a
    loss does.
    """
    logprobs = torch.log_softmax(policy, 0)
    sampled = logprobs.detach().exp()
    grad = gradient((sampled * estimate(estimator, logprobs, REFERENCE, torch)).sum(), policy)
    logprobs = torch.log_softmax(policy, 0)
    forward = gradient(divergence(logprobs, REFERENCE), policy)
    logprobs = torch.log_softmax(policy, 0)
    reverse = gradient(divergence(REFERENCE, logprobs), policy)
    expected = {K1: torch.zeros_like(policy), K2: forward, K3: reverse}[estimator]
    assert torch.allclose(grad, expected, atol=1e-12)
    assert not torch.allclose(forward, reverse, atol=1e-3)


@pytest.mark.parametrize(("estimator", "unbiased"), [(K1, True), (K2, False), (K3, False)])
def test_gradient_as_a_penalty_of_the_reward(policy, estimator, unbiased):
    """REINFORCE with the estimate as (negative) reward."""
    logprobs = torch.log_softmax(policy, 0)
    penalty = estimate(estimator, logprobs.detach(), REFERENCE, torch)
    grad = gradient((logprobs.detach().exp() * penalty * logprobs).sum(), policy)
    exact = gradient(divergence(torch.log_softmax(policy, 0), REFERENCE), policy)
    assert torch.allclose(grad, exact, atol=1e-12) == unbiased


@pytest.mark.parametrize("estimator", KLEstimator)
def test_numpy_and_torch_agree_and_stay_finite(estimator):
    logprobs, reference = np.array([-0.5, -1e4, -1e-7, -2.0]), np.array([-0.7, -1e-3, -1e4, -2.0])
    here = estimate(estimator, logprobs, reference, np)
    there = estimate(estimator, torch.from_numpy(logprobs), torch.from_numpy(reference), torch)
    np.testing.assert_allclose(here, there.numpy(), rtol=1e-12)
    assert np.isfinite(here).all() and here[3] == 0


def test_k3_keeps_its_digits_near_zero():
    """exp(d) - 1 - d in float32 would lose all of d**2 / 2 here."""
    d = np.float32(1e-3)
    value = estimate(K3, torch.zeros(1), torch.full((1,), d), torch)
    np.testing.assert_allclose(value.numpy(), [5.0017e-7], rtol=2e-4)
