"""Fine-tune by minimising the negative log-likelihood of the target tokens."""

from __future__ import annotations

from typing import Any

from coupler.batch import Batch
from coupler.interfaces import Algorithm, Columns
from coupler.metrics import Metrics
from coupler_algos.config import SFTConfig


class SFT(Algorithm):
    """Run ``algorithm=sft``, by :class:`~coupler_algos.config.SFTConfig`."""

    def __init__(self, config: SFTConfig) -> None:
        super().__init__(config)
        self.aggregation, self.constant = config.aggregation, config.aggregation_constant

    def advantages(self, batch: Batch) -> Batch:
        """Return the batch as it is: there is nothing to compare."""
        return batch

    def loss(self, out: Columns, batch: Columns) -> tuple[Any, Metrics]:
        """Return :func:`coupler_algos.losses.nll_loss`."""
        from coupler_algos import losses

        return losses.nll_loss(out, batch)
