"""Compare probabilities by token or by sequence, in torch.

A sequence is what a trajectory sampled: the tokens under ``loss_mask`` of all rows that
share its number in the column ``trajectory``. Without that column each row is one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coupler.interfaces import Columns
from coupler_algos.kl import MAX_LOG_RATIO
from coupler_algos.slots import Ratio


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of a batch of B rows, packed in one dimension of length T.

    All rows of a trajectory have to be in the batch: an algorithm that reads sequences
    has ``whole_units``.
    """

    mask: Tensor
    cu_seqlens: Tensor
    seq: Tensor
    trajectory: Tensor | None = None

    @classmethod
    def of(cls, batch: Columns) -> Sequences:
        """Return the sequences of ``batch``."""
        return cls(
            batch["loss_mask"],
            batch["cu_seqlens"],
            batch["seq"],
            batch.get("trajectory"),
        )

    def log_ratio(self, numerator: Tensor, denominator: Tensor, level: Ratio) -> Tensor:
        """Return the log of a ratio of probabilities [T], limited to +-20.

        Its gradient is zero beyond. Both are log-probs [T], with equal values outside
        ``mask``.

        Args:
            level: the ratio of each token, the product over its sequence, or the
                geometric mean of its sequence (GSPO, arXiv 2507.18071, eq. 7). A token
                has the value of its sequence and a gradient of its own alone, as in
                section 4.3 there.
        """
        difference = numerator - denominator
        if level is not Ratio.TOKEN:
            difference = self.shared(
                difference,
                mean=level is Ratio.GEOMETRIC,
            )
        return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def shared(self, per_token: Tensor, *, mean: bool = False) -> Tensor:
        """Give every token the sum or the mean over its sequence, with its own gradient
        only.

        Summed over a sequence, the gradients are then those of one loss per sequence.
        """
        total = self.total(per_token.detach())
        if mean:
            total = total / self.counts()
        return total[self.seq] + (per_token - per_token.detach())

    def count_once(self, per_token: Tensor) -> Tensor:
        """Divide a loss that all tokens of a sequence repeat among its valid tokens.

        Their sum is then one loss per sequence, as it is for the gradients, which
        :meth:`shared` divided already: they pass as they are.
        """
        value = per_token.detach()
        return value / self.counts()[self.seq] + (per_token - value)

    def total(self, per_token: Tensor) -> Tensor:
        """Return [B] the sum over the sequence that each row belongs to."""
        by_row = torch.segment_reduce(
            per_token,
            "sum",
            offsets=self.cu_seqlens.long(),
        )
        first = self.first()
        return torch.zeros_like(by_row).index_add(
            0,
            first,
            by_row,
        )[first]

    def largest(self, per_token: Tensor) -> Tensor:
        """Return [B] the largest value in the sequence that each row belongs to.

        No value is negative.
        """
        by_row = torch.segment_reduce(
            per_token,
            "max",
            offsets=self.cu_seqlens.long(),
        )
        first = self.first()
        return torch.zeros_like(by_row).scatter_reduce(0, first, by_row, "amax")[first]

    def once(self) -> Tensor:
        """Return [B] true at one row of each sequence that has valid tokens."""
        first = self.first()
        rows = torch.arange(len(first), device=first.device)
        return (first == rows) & (self.total(self.mask.to(torch.get_default_dtype())) > 0)

    def first(self) -> Tensor:
        """Return [B] the first row of the sequence that each row belongs to."""
        rows = torch.arange(len(self.cu_seqlens) - 1, device=self.seq.device)
        if self.trajectory is None or not len(rows):
            return rows
        return (self.trajectory[:, None] == self.trajectory).int().argmax(1)

    def counts(self) -> Tensor:
        """Return [B] the valid tokens of each row's sequence, at least 1."""
        return self.total(self.mask.to(torch.get_default_dtype())).clamp(min=1)
