"""Weigh, drop and measure tokens that another program sampled, in torch.

``w = p_recomputed / p_rollout`` is the weight of importance sampling. Its expectation
under the rollout is 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coupler.metrics import Metric, Metrics
from coupler_algos import kl
from coupler_algos.columns import Tokens, mean
from coupler_algos.config import KLEstimator, PolicyConfig
from coupler_algos.slots import BINARY, Correction, Level, Ratio
from coupler_algos.weighing import bounded

EDGE = 1e-6


def weights(config: PolicyConfig, tokens: Tokens, rollout: Tensor) -> tuple[Tensor, Metrics]:
    """Return the weight of each token [T]."""
    log = tokens.sequences.log_ratio(
        tokens.recomputed,
        rollout,
        config.correction_ratio,
    )
    weight, changed = bounded(config, log.exp(), torch)
    name = "capped" if config.correction is Correction.TRUNCATE else "masked"
    return weight, {f"correction_{name}": tokens.mean(changed)}


def dropped_as_unlikely(config: PolicyConfig, tokens: Tokens) -> Tensor:
    """Return [T] true in sequences with a negative advantage whose mean log-prob fell
    by more than ``opsm_delta`` (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
    """
    moved = tokens.sequences.log_ratio(
        tokens.old,
        tokens.logprobs.detach(),
        Ratio.GEOMETRIC,
    )
    return (tokens.advantages < 0) & (moved > config.opsm_delta)


def rejected(config: PolicyConfig, tokens: Tokens, rollout: Tensor) -> Tensor:
    """Return [T] true where a divergence of ``config.reject`` is beyond its bound.

    A key joins a level and an estimator of KL(rollout || recomputed) per token: k1 is
    ``-log w``, k2 ``(log w)^2 / 2`` and k3 ``w - 1 - log w`` (arXiv 2512.23075), and
    binary is that of :func:`binary`. A negative divergence counts by its size.
    """
    found = torch.zeros_like(tokens.mask)
    for key, bound in config.reject.items():
        level, _, kind = key.rpartition("_")
        divergence = _divergence(kind, tokens, rollout)
        joined = _joined(Level(level), tokens, divergence)
        found = found | (joined.abs() > bound)

    return found & tokens.mask


def _divergence(kind: str, tokens: Tokens, rollout: Tensor) -> Tensor:
    """Return how far trainer and rollout are apart at each token [T]."""
    if kind == BINARY:
        return binary(rollout, tokens.recomputed)
    return kl.estimate(
        KLEstimator(kind),
        rollout,
        tokens.recomputed,
        torch,
    )


def binary(first: Tensor, second: Tensor) -> Tensor:
    """Return the larger of KL(p || q) and KL(q || p) of two coins, in nats [T].

    One falls on a token with the probability p of ``first``, the other with the q of
    ``second``: ``KL(p || q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q))`` (J. Guo
    et al., KPop, ringtech.notion.site/kpop). It allows rare tokens a larger ratio than
    likely ones. Probabilities stay 1e-6 away from 0 and 1.

    Args:
        first: [T] log-probs.
        second: [T] log-probs.
    """
    p = first.exp().clamp(EDGE, 1 - EDGE)
    q = second.exp().clamp(EDGE, 1 - EDGE)
    hit = (p / q).log()
    miss = ((1 - p) / (1 - q)).log()

    forward = p * hit + (1 - p) * miss
    reverse = -q * hit - (1 - q) * miss
    return torch.maximum(forward, reverse)


def _joined(level: Level, tokens: Tokens, divergence: Tensor) -> Tensor:
    """Join the divergences of tokens [T], for each token of the sequence alike."""
    sequences = tokens.sequences
    match level:
        case Level.TOKEN:
            return divergence
        case Level.MAX:
            return sequences.largest(divergence.abs())[sequences.seq]
        case Level.SUM:
            return sequences.total(divergence)[sequences.seq]
        case Level.MEAN:
            return (sequences.total(divergence) / sequences.counts())[sequences.seq]


def measured(config: PolicyConfig, tokens: Tokens, rollout: Tensor) -> Metrics:
    """Measure how far the trainer's distribution is from the rollout's.

    ``chi2`` is ``mean(w^2) - 1``. ``ess`` is ``1 / mean(w^2)``, which is Kish's
    effective sample size, as a share, for weights whose mean is 1. Those of sequences
    need ``config.reads_sequences``.
    """
    mask, sequences = tokens.mask, tokens.sequences
    weight = sequences.log_ratio(
        tokens.recomputed,
        rollout,
        Ratio.TOKEN,
    ).exp()
    square = torch.where(mask, weight * weight, 0)

    metrics = {
        "mismatch/weight": tokens.mean(weight),
        "mismatch/weight_max": Metric(
            _most(torch.where(mask, weight, 0)),
            how="max",
        ),
        "mismatch/chi2": tokens.mean(square - 1),
        "mismatch/ess": Metric(mask.sum(), square.sum()),
        "mismatch/k3": tokens.mean(
            kl.estimate(
                KLEstimator.K3,
                rollout,
                tokens.recomputed,
                torch,
            ),
        ),
    }
    if not config.reads_sequences:
        return metrics
    return metrics | _of_sequences(tokens, rollout)


def _of_sequences(tokens: Tokens, rollout: Tensor) -> Metrics:
    """Measure whole sequences, each once. A perplexity is ``exp(-mean log p)``."""
    sequences = tokens.sequences
    valid, once = sequences.counts(), sequences.once()
    limit = kl.MAX_LOG_RATIO

    log = sequences.total(tokens.recomputed - rollout)
    square = (2 * log.clamp(-limit, limit)).exp()
    train, inference = (-sequences.total(c) / valid for c in (tokens.recomputed, rollout))
    return {
        "mismatch/chi2_sequence": mean(square - 1, once),
        "mismatch/ess_sequence": Metric(
            once.sum(),
            torch.where(once, square, 0).sum(),
        ),
        "mismatch/ppl_train": mean(train.exp(), once),
        "mismatch/ppl_rollout": mean(inference.exp(), once),
        "mismatch/ppl_ratio": mean((train - inference).exp(), once),
    }


def _most(values: Tensor) -> Tensor:
    return values.max() if len(values) else values.new_zeros(())
