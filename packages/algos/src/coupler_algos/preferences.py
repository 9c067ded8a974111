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


class OnlineDPO(DPO):
    """Run ``algorithm=online_dpo``: DPO in the loop of ``coupler train``.

    The best and the worst completion of a prompt by reward are a pair (arXiv
    2402.04792, with a reward in place of the annotator). The others are not trained on.
    """

    def advantages(self, batch: Batch) -> Batch:
        """Leave the pairs: rows with ``chosen`` [B] bool, ``unit`` and ``trajectory``
        by pair, and ``advantages`` [T] float32 of 1 and -1.

        Of equal rewards, the trajectory with the lower number is the worst and the one
        with the higher number the best. A group whose rewards are all equal has no
        pair. A batch of pairs stays as it is.
        """
        if batch.has("chosen"):
            return batch
        first, of_row = batch.trajectories()
        names = batch["trajectory"] if batch.has("trajectory") else np.arange(len(batch))
        pair, chosen = best_and_worst(
            batch["group"][first],
            batch["reward"][first],
            names[first],
        )

        rows = np.flatnonzero(pair[of_row] >= 0)
        kept = batch.take(rows)
        number = pair[of_row][rows]
        side = chosen[of_row][rows]
        pairs = kept.with_seqs(
            unit=number,
            trajectory=number,
            chosen=side,
        )

        sign = kept.spread(np.where(side, 1, -1))
        sign = np.where(kept["loss_mask"], sign, 0)
        return pairs.with_tokens(advantages=sign.astype(np.float32))

    def keep(self, group: Batch) -> bool:
        """Reject a group whose rewards are all equal, so that every prompt of a step
        has a pair.
        """
        return bool(np.ptp(group["reward"]) > 0)


def best_and_worst(
    group: np.ndarray,
    reward: np.ndarray,
    name: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Find the trajectories with the most and the least reward of each group.

    Args:
        name: decides between equal rewards. All three are [N].

    Returns:
        [N] int64 the number of the pair, -1 for none, and [N] True at the best.
    """
    order = np.lexsort((name, reward, group))
    _, start, size = np.unique(
        group[order],
        return_index=True,
        return_counts=True,
    )
    worst = order[start]
    best = order[start + size - 1]
    differ = reward[best] > reward[worst]

    pair = np.full(len(group), -1, np.int64)
    for side in (worst[differ], best[differ]):
        pair[side] = np.arange(len(side))
    chosen = np.zeros(len(group), bool)
    chosen[best[differ]] = True
    return pair, chosen


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
        mask = batch["loss_mask"]
        policy, reference = (
            np.where(mask, batch[name], 0).astype(np.float64)
            for name in ("old_logprobs", "ref_logprobs")
        )

        mismatched = np.zeros(len(batch), bool)
        if batch.has("mismatched"):
            mismatched = batch["mismatched"]
        ratio = batch.sum_by_sequence(policy - reference)[mismatched]
        point = 0.0
        if len(ratio):
            point = max(float(ratio.mean()), point)
            batch = batch.take(np.flatnonzero(~mismatched))

        return batch.with_seqs(
            reference_point=np.full(
                len(batch),
                point,
                np.float32,
            ),
        )

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
