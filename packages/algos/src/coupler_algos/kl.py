"""Estimate KL(policy || reference) from a token that the policy sampled, in three ways.

J. Schulman, "Approximating KL Divergence" (http://joschu.net/blog/kl-approx.html), with
``d = log reference - log policy``:

=========  ===========  ===================  ===========================================
estimator  per token    value                gradient of the value, as a loss
=========  ===========  ===================  ===========================================
k1         -d           unbiased, may be <0  zero in expectation: it estimates nothing
k2         d ** 2 / 2   biased, never < 0    unbiased: that of KL(policy || reference)
k3         exp(d)-d-1   unbiased, never < 0  unbiased: that of KL(reference || policy)
=========  ===========  ===================  ===========================================

The gradient of k3 is that of the other direction. Its value is DeepSeekMath (arXiv
2402.03300) eq. 4.

In the reward it is the other way round: k1 there leads to the gradient of
KL(policy || reference), and k2 and k3 do not. All of this holds for tokens that the
policy itself sampled, and while ``d`` stays within ``MAX_LOG_RATIO``: beyond, ``d`` is
constant and its gradient zero.
"""

from __future__ import annotations

from typing import Any

from coupler_algos.config import KLEstimator

KL_COEF = "kl_coef"
"""The column [B] float32 of the coefficient that a controller put in force."""
MAX_LOG_RATIO = 20.0
"""Limit of a log-ratio. exp(20) is 5e8: larger ratios mean nothing and would end in
infinities."""


def estimate(estimator: KLEstimator, logprobs: Any, ref_logprobs: Any, xp: Any) -> Any:
    """Estimate the divergence per token, in nats.

    Args:
        estimator: one of the three above.
        logprobs: [T] log-probs of the policy, an array of ``xp``.
        ref_logprobs: [T] log-probs of the reference.
        xp: the module ``numpy`` or ``torch``.
    """
    d = (ref_logprobs - logprobs).clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case KLEstimator.K1:
            return -d
        case KLEstimator.K2:
            return d * d / 2
        case KLEstimator.K3:
            return xp.expm1(d) - d
