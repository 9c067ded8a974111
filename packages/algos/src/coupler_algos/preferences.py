"""Train on preferences: DPO and its relatives, KTO, and Bradley-Terry reward models.

They are algorithms of ``coupler sft``. Core packs the rows of a pair with one ``unit``
and one ``trajectory``, so that they stay in one mini-batch and one micro-batch, and so
that ``sequence_mean_token_sum`` is the mean over pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coupler.batch import Batch
from coupler.interfaces import Aggregation, Algorithm, Columns, Output
from coupler.metrics import Metrics
from coupler_algos.preference_config import DPOConfig, KTOConfig, RewardModelConfig


class DPO(Algorithm):
    """Run ``algorithm=dpo``, by :class:`~coupler_algos.preference_config.DPOConfig`."""

    config: DPOConfig
    aggregation = Aggregation.SEQUENCE_MEAN_TOKEN_SUM

    def __init__(self, config: DPOConfig) -> None:
        super().__init__(config)
        self.needs = config.needs

    def advantages(self, batch: Batch) -> Batch:
        """Return the batch as it is: its pairs are made already."""
        return batch

    def loss(self, out: Columns, batch: Columns) -> tuple[Any, Metrics]:
        """Return :func:`coupler_algos.preference_losses.dpo_loss`."""
        from coupler_algos import preference_losses

        return preference_losses.dpo_loss(self.config, out, batch)


class KTO(Algorithm):
    """Run ``algorithm=kto``, by :class:`~coupler_algos.preference_config.KTOConfig`."""

    config: KTOConfig
    aggregation = Aggregation.SEQUENCE_MEAN_TOKEN_SUM

    def __init__(self, config: KTOConfig) -> None:
        super().__init__(config)
        self.needs = config.needs
        self.always = frozenset({"old_logprobs"})

    def advantages(self, batch: Batch) -> Batch:
        """Add ``reference_point`` [B] float32, and drop the mismatched rows.

        It is ``max(0, mean over mismatched rows of sum log pi / ref)``, the estimate of
        KL(pi || ref) below eq. 8 of KTO (arXiv 2402.01306). It is one number of the
        whole batch, from passes before its first optimizer step, and has no gradient.
        So it depends on neither ranks nor micro-batches.
        """
        mismatched = batch["mismatched"]
        mask = batch["loss_mask"]
        both = batch["old_logprobs"], batch["ref_logprobs"]
        policy, reference = (np.where(mask, column, 0).astype(np.float64) for column in both)

        ratio = batch.sum_by_sequence(policy - reference)[mismatched]
        point = max(float(ratio.mean()), 0.0) if len(ratio) else 0.0
        kept = batch.take(np.flatnonzero(~mismatched)) if mismatched.any() else batch
        return kept.with_seqs(reference_point=np.full(len(kept), point, np.float32))

    def loss(self, out: Columns, batch: Columns) -> tuple[Any, Metrics]:
        """Return :func:`coupler_algos.preference_losses.kto_loss`."""
        from coupler_algos import preference_losses

        return preference_losses.kto_loss(self.config, out, batch)


class RewardModel(Algorithm):
    """Run ``algorithm=reward_model``.

    Options are those of :class:`~coupler_algos.preference_config.RewardModelConfig`.
    """

    config: RewardModelConfig
    aggregation = Aggregation.SEQUENCE_MEAN_TOKEN_SUM
    want = (Output("values"),)

    def advantages(self, batch: Batch) -> Batch:
        """Return the batch as it is: its pairs are made already."""
        return batch

    def loss(self, out: Columns, batch: Columns) -> tuple[Any, Metrics]:
        """Return :func:`coupler_algos.preference_losses.score_loss`."""
        from coupler_algos import preference_losses

        return preference_losses.score_loss(self.config, out, batch)
