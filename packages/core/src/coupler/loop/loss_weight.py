"""Compute the denominator of a step's loss once, over the global mini-batch.

This is law 1: normalisation is data.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from coupler.batch import Batch
from coupler.interfaces import Aggregation, Algorithm, StepInfo


def loss_weight(batch: Batch, aggregation: Aggregation, constant: int = 1) -> np.ndarray:
    """Return weights w, [T] float32, so that a step's loss is ``sum(token_loss * w)``.

    They are 0 outside ``loss_mask``. Rows with equal ``trajectory`` are one sequence
    here. A sequence without valid tokens counts nowhere. A mini-batch without any has
    weights of zero.
    """
    mask = batch["loss_mask"].astype(np.float64)
    _, of_row = batch.trajectories()
    in_trajectory = np.bincount(of_row, batch.sum_by_sequence(mask))
    valid, num_sequences = in_trajectory[of_row], max(int((in_trajectory > 0).sum()), 1)

    match aggregation:
        case Aggregation.TOKEN_MEAN:
            per_sequence = np.full(len(batch), 1 / max(mask.sum(), 1))
        case Aggregation.SEQUENCE_MEAN_TOKEN_MEAN:
            per_sequence = 1 / (num_sequences * np.maximum(valid, 1))
        case Aggregation.SEQUENCE_MEAN_TOKEN_SUM:
            per_sequence = np.full(len(batch), 1 / num_sequences)
        case Aggregation.CONSTANT:
            per_sequence = np.full(len(batch), 1 / (num_sequences * constant))

    return (batch.spread(per_sequence) * mask).astype(np.float32)


def prepare(batch: Batch, algorithm: Algorithm) -> Batch:
    """Add ``loss_weight``, and put zeros under the mask so that no NaN there can reach
    a gradient. Without ``algorithm.whole_units`` each row is a unit.

    A column ``weight`` [B] multiplies the weights of a row, and not their denominator.
    Columns of ``algorithm.components`` are normalised each over its own tokens.
    """
    mask = batch["loss_mask"]
    if batch.has("unit") and not algorithm.whole_units:
        batch = batch.with_seqs(unit=np.arange(len(batch)))

    clean = {
        name: np.where(mask, column, 0).astype(column.dtype)
        for name, column in batch.tokens.items()
        if column.dtype.kind == "f" and column.ndim == 1
    }
    how = (algorithm.aggregation, algorithm.constant)
    for name in algorithm.components:
        own = batch.with_tokens(loss_mask=clean[name] != 0)
        clean[name] *= loss_weight(own, *how)

    weight = mask.astype(np.float32) if algorithm.components else loss_weight(batch, *how)
    weight *= batch.spread(batch["weight"]) if batch.has("weight") else 1
    return replace(batch, tokens={**batch.tokens, **clean, "loss_weight": weight})


def step_info(batch: Batch, index: int) -> StepInfo:
    """Return the global facts of the optimizer step that trains on ``batch``."""
    return StepInfo(total_tokens=batch.num_tokens, index=index)
