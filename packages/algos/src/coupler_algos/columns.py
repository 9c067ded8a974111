"""Read the columns of the policy's loss, with zeros under the mask, in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coupler.interfaces import Columns
from coupler.metrics import Metric
from coupler_algos.config import Behaviour, PolicyConfig
from coupler_algos.covariance import MARKED
from coupler_algos.ratios import Sequences
from coupler_algos.second_moment import FAR


@dataclass(frozen=True, slots=True)
class Tokens:
    """The columns of T tokens, each 0 where nothing was sampled.

    Attributes:
        logprobs: of the policy, with its gradient.
        old: the denominator of the ratio, by ``config.behaviour``.
        recomputed: the trainer's before the batch's first step. Where the step is the
            only one, or the batch has none, they are those of now.
        rollout: the rollout's, or None where ``config`` does not need them.
        marked: true where :mod:`coupler_algos.covariance` marked a token, or None.
        far: true where :mod:`coupler_algos.second_moment` drops a token, or None.
    """

    sequences: Sequences
    logprobs: Tensor
    old: Tensor
    recomputed: Tensor
    rollout: Tensor | None
    advantages: Tensor
    marked: Tensor | None
    far: Tensor | None

    @classmethod
    def of(cls, config: PolicyConfig, out: Columns, batch: Columns) -> Tokens:
        """Return the columns that a loss under ``config`` reads."""
        mask = batch["loss_mask"]

        def valid(column: Tensor) -> Tensor:
            return torch.where(mask, column, 0.0)

        def given(name: str) -> Tensor | None:
            return valid(batch[name]) if name in batch else None

        logprobs = valid(out["logprobs"])
        before, marked, far = (given(name) for name in ("old_logprobs", MARKED, FAR))
        recomputed = logprobs.detach() if before is None else before
        by_rollout = config.behaviour is Behaviour.ROLLOUT
        reads = by_rollout or config.measures_mismatch
        rollout = valid(batch["rollout_logprobs"]) if reads else None

        return cls(
            sequences=Sequences.of(batch),
            logprobs=logprobs,
            old=recomputed if rollout is None or not by_rollout else rollout,
            recomputed=recomputed,
            rollout=rollout,
            advantages=valid(batch["advantages"]),
            marked=None if marked is None else marked > 0,
            far=None if far is None else far > 0,
        )

    @property
    def mask(self) -> Tensor:
        """Return [T] true at sampled tokens."""
        return self.sequences.mask

    def mean(self, per_token: Tensor) -> Metric:
        """Return the mean over sampled tokens, without a gradient."""
        return mean(per_token, self.mask)


def mean(per_token: Tensor, mask: Tensor) -> Metric:
    """Return the mean of [T] over ``mask``, without a gradient."""
    return Metric(
        torch.where(
            mask,
            per_token.detach(),
            0,
        ).sum(),
        mask.sum(),
    )
