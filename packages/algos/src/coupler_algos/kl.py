"""Three estimators of KL(policy || reference) from a token that the policy sampled.

J. Schulman, "Approximating KL Divergence" (http://joschu.net/blog/kl-approx.html), with
``d = log reference - log policy``:

=========  ===========  =======================  ==========================================================
estimator  per token    value                    gradient of the value (as a term of the loss)
=========  ===========  =======================  ==========================================================
k1         -d           unbiased, can be < 0     zero in expectation: estimates nothing
k2         d ** 2 / 2   biased, never < 0        unbiased for the gradient of KL(policy || reference)
k3         exp(d)-d-1   unbiased, never < 0      unbiased for the gradient of KL(reference || policy), the
                                                 other direction; DeepSeekMath (arXiv 2402.03300) eq. 4
=========  ===========  =======================  ==========================================================

In the reward it is the other way round: there k1 leads to the gradient of KL(policy || reference), k2 and k3 do not.
All of it holds for tokens sampled by the policy itself, and where ``d`` stays within ``MAX_LOG_RATIO``: beyond, it is
constant and its gradient zero.
"""

from __future__ import annotations

from typing import Any

from coupler_algos.config import KLEstimator

KL_COEF = "kl_coef"  # [B] float32: the coefficient that a controller has put in force; read by the reward or the loss
MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: larger ratios of probabilities mean nothing and would end in infinities


def estimate(estimator: KLEstimator, logprobs: Any, ref_logprobs: Any, xp: Any) -> Any:
    """Estimate the divergence per token, in nats.

    Args:
        estimator: which.
        logprobs: [T] of the policy that sampled, an array of ``xp``.
        ref_logprobs: [T] of the reference.
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
