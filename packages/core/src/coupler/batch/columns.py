"""What engines read of a batch, before it becomes tensors of theirs."""

from __future__ import annotations

from typing import Final

import numpy as np

from coupler.batch import Batch
from coupler.errors import CouplerError

ROUTED_EXPERTS: Final = "routed_experts"  # the token column [T, layers, topk] that an engine replays


def loss_columns(batch: Batch) -> dict[str, np.ndarray]:
    """Every numeric column, and which sequence each row belongs to: ``seq`` [T] and ``cu_seqlens`` [B + 1].

    Without ``routed_experts``, which is for the engine and wider than all others together.
    """
    columns = ((n, c) for n, c in (*batch.tokens.items(), *batch.seqs.items()) if n != ROUTED_EXPERTS)
    arrays = {name: column for name, column in columns if column.dtype.kind in "biuf"}
    return {**arrays, "seq": np.repeat(np.arange(len(batch)), batch.lengths), "cu_seqlens": batch.starts}


def temperature_of(batch: Batch, rows: np.ndarray) -> np.ndarray | None:
    """[R] fp32: the sampling temperature at these token rows; None if it is 1 at all of them.

    Raises:
        CouplerError: one is not above 0.
    """
    if not batch.has("temperature"):
        return None
    column = batch["temperature"] if "temperature" in batch.tokens else batch.spread(batch["temperature"])
    scale = column[rows].astype(np.float32)
    if not (scale > 0).all():
        raise CouplerError(
            f"a temperature of {scale.min()} has no log-probabilities: they are those of the sampling distribution.\n"
            "  set:  sampling.temperature above 0"
        )
    return None if (scale == 1).all() else scale
