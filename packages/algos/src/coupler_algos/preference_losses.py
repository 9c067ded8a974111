"""Compute losses of preferences, in torch.

The loss of a pair or of a row is a number of its own. Each of its valid tokens holds an
equal part of it, so that the sum over tokens is that number and has its exact gradient.
Core's ``loss_weight`` makes a step's loss the mean over pairs or rows. Rows of a pair
share a ``unit``, which engines keep in one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from coupler.interfaces import Columns
from coupler.metrics import Metric, Metrics
from coupler_algos.preference_config import DPOConfig, KTOConfig, PairLoss, RewardModelConfig


@dataclass(frozen=True, slots=True)
class Rows:
    """The B rows of a micro-batch, whose tokens are packed in one dimension T.

    Attributes:
        mask: [T] True at tokens that are learnt.
        of_token: [T] the row of each token.
        bounds: [B + 1] int64, the first token of each row, then T.
    """

    mask: Tensor
    of_token: Tensor
    bounds: Tensor

    @classmethod
    def of(cls, batch: Columns) -> Rows:
        """Return the rows of ``batch``."""
        return cls(
            batch["loss_mask"],
            batch["seq"],
            batch["cu_seqlens"].long(),
        )

    def total(self, per_token: Tensor) -> Tensor:
        """Sum over the tokens of each row: [T] -> [B]."""
        return torch.segment_reduce(per_token, "sum", offsets=self.bounds)

    def counts(self, per_token: Tensor) -> Tensor:
        """Return the valid tokens of each row [B], in the dtype of ``per_token``."""
        return self.total(self.mask.to(per_token.dtype))


@dataclass(frozen=True, slots=True)
class Pairs:
    """The P pairs of a micro-batch. A side may have several rows.

    Attributes:
        of_row: [B] the pair of each row.
        chosen: [B] True where a row is of the chosen side.
    """

    rows: Rows
    of_row: Tensor
    chosen: Tensor
    number: int

    @classmethod
    def of(cls, batch: Columns) -> Pairs:
        """Return the pairs of ``batch``: rows of one ``unit`` are one pair."""
        names, of_row = torch.unique(batch["unit"], return_inverse=True)
        return cls(
            Rows.of(batch),
            of_row,
            batch["chosen"],
            len(names),
        )

    def sides(self, per_token: Tensor) -> Tensor:
        """Sum over the tokens of each side, chosen and rejected: [T] -> [2, P]."""
        side = self.of_row + self.number * (~self.chosen).long()
        zeros = per_token.new_zeros(2 * self.number)
        total = zeros.index_add(
            0,
            side,
            self.rows.total(per_token),
        )
        return total.view(2, self.number)

    def counts(self, per_token: Tensor) -> Tensor:
        """Return the valid tokens of each side [2, P], in the dtype given."""
        return self.sides(self.rows.mask.to(per_token.dtype))

    def per_pair(self, column: Tensor) -> Tensor:
        """Take a column that is equal in all rows of a pair: [B] -> [P]."""
        return column.new_zeros(self.number).scatter(0, self.of_row, column)

    def spread(self, loss: Tensor, counts: Tensor) -> Tensor:
        """Divide the loss of a pair among its valid tokens: [P] -> [T].

        Args:
            counts: [2, P] valid tokens of each side.
        """
        share = loss / counts.sum(0).clamp(min=1)
        return torch.where(
            self.rows.mask,
            share[self.of_row][self.rows.of_token],
            0.0,
        )


def of_margin(config: DPOConfig, margin: Tensor) -> Tensor:
    """Return the loss of pairs by their margins, both [P].

    The margin is h = log pi(y_w) / ref(y_w) - log pi(y_l) / ref(y_l). ``sigmoid`` is
    ``-(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h)`` with label smoothing s,
    DPO (arXiv 2305.18290) eq. 7 where s = 0. ``ipo`` is ``(h - 1 / (2 beta))^2`` (arXiv
    2310.12036 eq. 17), and ``hinge`` is ``max(0, 1 - beta h)`` (arXiv 2309.06657 eq.
    11).
    """
    match config.loss:
        case PairLoss.SIGMOID:
            smoothing = config.label_smoothing
            loss = -(1 - smoothing) * logsigmoid(config.beta * margin)
            if not smoothing:
                return loss
            return loss - smoothing * logsigmoid(-config.beta * margin)
        case PairLoss.IPO:
            return (margin - 1 / (2 * config.beta)) ** 2
        case PairLoss.HINGE:
            return (1 - config.beta * margin).clamp(min=0)


def dpo_loss(
    config: DPOConfig,
    out: Columns,
    batch: Columns,
) -> tuple[Tensor, Metrics]:
    """Return the loss of :func:`of_margin` by tokens [T], with ``sft_coef`` times the
    mean negative log-likelihood of the chosen completion (RPO, arXiv 2404.19733 eq. 1).
    """
    pairs = Pairs.of(batch)
    mask = batch["loss_mask"]
    logprobs = torch.where(mask, out["logprobs"], 0.0)
    reference = torch.zeros_like(logprobs)
    if not config.reference_free:
        reference = torch.where(mask, batch["ref_logprobs"], 0.0)

    counts = pairs.counts(logprobs)
    policy = pairs.sides(logprobs)
    ratio = policy - pairs.sides(reference)
    if config.length_normalised:
        ratio = ratio / counts.clamp(min=1)
    loss = pairs.spread(
        of_margin(config, ratio[0] - ratio[1]),
        counts,
    )

    valid = counts.sum(0) > 0
    metrics = _of_rewards(config.beta * ratio.detach(), valid)
    for side, total in zip(("chosen", "rejected"), policy.detach(), strict=True):
        metrics[f"logps/{side}"] = _mean(total, valid)

    if config.sft_coef:
        row = pairs.rows.of_token
        tokens = counts[0].clamp(min=1)[pairs.of_row][row]
        nll = torch.where(
            mask & pairs.chosen[row],
            -logprobs / tokens,
            0.0,
        )
        metrics["nll"] = Metric(
            -policy[0].detach().sum(),
            counts[0].sum(),
        )
        loss = loss + config.sft_coef * nll
    return loss, metrics


def kto_loss(
    config: KTOConfig,
    out: Columns,
    batch: Columns,
) -> tuple[Tensor, Metrics]:
    """Return ``lambda (1 - sigmoid(+-beta (r - z)))`` of each row by tokens [T].

    r is the row's sum of log pi / ref, and z the column ``reference_point``. The sign
    is + and lambda ``desirable_weight`` for a desirable row, and - and
    ``undesirable_weight`` for another: KTO (arXiv 2402.01306) eq. 8.
    """
    rows = Rows.of(batch)
    mask = batch["loss_mask"]
    desirable = batch["desirable"]
    ratio = torch.where(mask, out["logprobs"] - batch["ref_logprobs"], 0.0)
    reward = rows.total(ratio)

    over = reward - batch["reference_point"].to(reward.dtype)
    sign = torch.where(desirable, 1.0, -1.0)
    weight = torch.where(
        desirable,
        config.desirable_weight,
        config.undesirable_weight,
    )
    counts = rows.counts(ratio)
    value = torch.sigmoid(-config.beta * sign * over)
    loss = weight * value / counts.clamp(min=1)

    valid = counts > 0
    implied = config.beta * reward.detach()
    metrics = {
        "rewards/desirable": _mean(implied, valid & desirable),
        "rewards/undesirable": _mean(implied, valid & ~desirable),
        "kto/reference_point": _mean(batch["reference_point"], valid),
    }
    return torch.where(mask, loss[rows.of_token], 0.0), metrics


def score_loss(
    config: RewardModelConfig,
    out: Columns,
    batch: Columns,
) -> tuple[Tensor, Metrics]:
    """Return ``-log sigmoid(s_w - s_l - m) + centering_coef (s_w + s_l)^2`` of each
    pair by tokens [T], with the margin m of the row (0 where it has none).

    The model is that of Bradley and Terry (1952), as in arXiv 2203.02155 eq. 1. The
    margin is that of Llama 2 (arXiv 2307.09288) eq. 2, and the centering term that of
    arXiv 2312.09244, section 2.
    """
    pairs = Pairs.of(batch)
    mask = batch["loss_mask"]
    values = torch.where(mask, out["values"], 0.0)
    scores = pairs.sides(values)
    margin = pairs.per_pair(batch["margin"]).to(scores.dtype)

    loss = -logsigmoid(scores[0] - scores[1] - margin)
    if config.centering_coef:
        loss = loss + config.centering_coef * scores.sum(0) ** 2

    counts = pairs.counts(values)
    metrics = _of_rewards(
        scores.detach(),
        counts.sum(0) > 0,
    )
    return pairs.spread(loss, counts), metrics


def _of_rewards(rewards: Tensor, valid: Tensor) -> dict[str, Metric]:
    """Describe the rewards [2, P] of chosen and rejected completions."""
    margin = rewards[0] - rewards[1]
    described: Mapping[str, Tensor] = {
        "chosen": rewards[0],
        "rejected": rewards[1],
        "margin": margin,
        "accuracy": (margin > 0).to(margin.dtype),
    }
    return {f"rewards/{name}": _mean(column, valid) for name, column in described.items()}


def _mean(column: Tensor, valid: Tensor) -> Metric:
    return Metric(
        torch.where(valid, column, 0.0).sum(),
        valid.sum(),
    )
