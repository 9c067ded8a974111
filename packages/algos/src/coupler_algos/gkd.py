"""Learn a teacher's distribution at every position: generalized knowledge distillation
(arXiv 2306.13649), with the teacher's k most likely tokens and a tail.

Both sides become distributions over k + 1 outcomes: the teacher's k most likely tokens,
and all others together. A divergence of these is at most that of the whole
vocabularies, and 0 only where they agree.
"""

from __future__ import annotations

from math import log, log1p
from typing import Final

import torch
from torch import Tensor

from coupler.interfaces import Columns
from coupler.metrics import Metrics
from coupler_algos.columns import mean
from coupler_algos.config import GroupConfig

ROUNDING: Final = 1e-7
"""The least probability of a tail: what float32 leaves of 1 minus a sum."""


def gkd_loss(config: GroupConfig, out: Columns, batch: Columns) -> tuple[Tensor, Metrics]:
    """Return the divergence of teacher and policy [T], in nats.

    ``gkd_tail`` is the teacher's probability of the tokens that are not among its k
    most likely ones.
    """
    mask = batch["loss_mask"]
    teacher, policy = (
        torch.where(mask[:, None], column, 0.0)
        for column in (batch["teacher_top_logprobs"], out["top_logprobs"])
    )

    p, q = with_tail(teacher), with_tail(policy)
    loss = torch.where(mask, divergence(config.gkd_beta, p, q), 0.0)
    return loss, {
        "gkd": mean(loss, mask),
        "gkd_tail": mean(p[:, -1].exp(), mask),
    }


def with_tail(logprobs: Tensor) -> Tensor:
    """Add the log-prob of all other tokens: [T, k] -> [T, k + 1]."""
    rest = 1 - logprobs.exp().sum(-1, keepdim=True)
    return torch.cat([logprobs, rest.clamp(min=ROUNDING).log()], -1)


def divergence(beta: float, p: Tensor, q: Tensor) -> Tensor:
    """Return the divergence of teacher P and policy Q by their log-probs, [T, n] each.

    It is KL(P || Q) for beta 0 and KL(Q || P) for beta 1. Between them it is
    ``beta KL(P || M) + (1 - beta) KL(Q || M)`` with ``M = beta P + (1 - beta) Q``, the
    generalized Jensen-Shannon divergence of arXiv 2306.13649, section 2. Divided by
    beta or 1 - beta, it approaches these limits.
    """
    if beta == 0:
        return _kl(p, q)
    if beta == 1:
        return _kl(q, p)
    middle = torch.logaddexp(p + log(beta), q + log1p(-beta))
    return beta * _kl(p, middle) + (1 - beta) * _kl(q, middle)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)
