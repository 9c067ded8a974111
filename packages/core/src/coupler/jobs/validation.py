"""Measure the loss on held-out rows while supervised training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from coupler.data import Example
from coupler.interfaces import Algorithm, Output
from coupler.jobs.sft_trainer import pack
from coupler.loop.device_memory import Held, Residency
from coupler.loop.engine_group import EngineGroup
from coupler.loop.loss_weight import prepare
from coupler.metrics import Metric, Metrics

LOGPROBS = Output("logprobs")
MAX_EXPONENT = 700.0  # exp of more is no float


@dataclass(frozen=True, slots=True)
class Validation:
    """Computes the loss of the policy on fixed examples, without a gradient.

    All examples are one mini-batch: a token weighs what it would weigh in a training
    step on all of them. So the numbers do not depend on the rows of a forward pass, on
    micro-batches or on ranks.
    """

    policy: EngineGroup
    algorithm: Algorithm
    examples: Sequence[Example]
    # of one forward pass
    num_rows: int
    residency: Residency

    async def run(self) -> Metrics:
        """Return ``eval/loss``, ``eval/nll`` and ``eval/perplexity``.

        The loss is ``sum(-log p * loss_weight)``, the nll the mean of ``-log p`` over
        the trained tokens in nats, and the perplexity its exponential. Where rows name
        several values of ``data_source``, each has an nll of its own.
        """
        batch = prepare(pack(self.examples), self.algorithm)
        async with self.residency("eval_loss", {"policy": frozenset({Held.PARAMS})}):
            logprobs = np.concatenate([await self._logprobs(i) for i in self._starts()])
        mask = batch["loss_mask"]
        surprise = np.where(mask, -logprobs.astype(np.float64), 0.0)

        per_row, tokens = batch.sum_by_sequence(surprise), batch.sum_by_sequence(mask)
        mean = float(per_row.sum() / max(tokens.sum(), 1))
        metrics = {
            "eval/loss": Metric(
                float((surprise * batch["loss_weight"]).sum()),
                how="sum",
            ),
            "eval/nll": Metric(
                float(per_row.sum()),
                float(tokens.sum()),
            ),
            "eval/perplexity": Metric(
                exp(min(mean, MAX_EXPONENT)),
                how="sum",
            ),
        }

        sources = [example.row.data_source for example in self.examples]
        for source in sorted(set(sources)) if len(set(sources)) > 1 else ():
            ours = np.array([own == source for own in sources])
            total, count = float(per_row[ours].sum()), float(tokens[ours].sum())
            metrics[f"eval/{source or 'other'}/nll"] = Metric(total, count)
        return metrics

    def _starts(self) -> range:
        return range(0, len(self.examples), self.num_rows)

    async def _logprobs(self, start: int) -> np.ndarray:
        part = pack(self.examples[start : start + self.num_rows])
        return (await self.policy.forward(part, (LOGPROBS,)))["logprobs"]
