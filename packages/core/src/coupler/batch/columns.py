"""Select the columns that engines read, before these become tensors."""

from __future__ import annotations

from typing import Final

import numpy as np

from coupler.batch import Batch
from coupler.errors import CouplerError

# the token column [T, layers, topk] that an engine replays
ROUTED_EXPERTS: Final = "routed_experts"
# the token column [T, kept] of the ids that each token was sampled among; -1 is no id
SAMPLING_MASK: Final = "sampling_mask"
# the column [B] that is true where the completion of a row is the answer of the data
DEMONSTRATION: Final = "demonstration"
# the token column [T, k] of the ids whose log-probs an engine computes; -1 is no id
TOP_IDS: Final = "top_ids"
# only engines read these, and they are wider than all other columns together
OF_ENGINES: Final = (ROUTED_EXPERTS, SAMPLING_MASK, TOP_IDS)

# the column [B] of the part of a step that engines completed a row with
PART: Final = "part"

# no loss reads these: the source of each token, its turn and what that was shown, how
# the episode ended, the number of its row in the data, and its part of the step
OF_RECORDS: Final = ("origin", "turn", "anchor", "ended", "row", PART)


def of_policy(batch: Batch) -> Batch:
    """Return the rows that the policy sampled, without demonstrations."""
    if not batch.has(DEMONSTRATION):
        return batch
    return batch.take(np.flatnonzero(~batch[DEMONSTRATION]))


def loss_columns(batch: Batch) -> dict[str, np.ndarray]:
    """Return every numeric column, with ``seq`` [T], the sequence of each token, and
    ``cu_seqlens`` [B + 1]. Those that only engines read are left out.
    """
    columns = (
        (n, c) for n, c in (*batch.tokens.items(), *batch.seqs.items()) if n not in OF_ENGINES
    )
    arrays = {name: column for name, column in columns if column.dtype.kind in "biuf"}
    return {
        **arrays,
        "seq": np.repeat(np.arange(len(batch)), batch.lengths),
        "cu_seqlens": batch.starts,
    }


def temperature_of(batch: Batch, rows: np.ndarray) -> np.ndarray | None:
    """Return the sampling temperature at token rows, [R] fp32, or None if all are 1.

    Raises:
        CouplerError: a temperature is not above 0.
    """
    if not batch.has("temperature"):
        return None
    column = (
        batch["temperature"]
        if "temperature" in batch.tokens
        else batch.spread(batch["temperature"])
    )
    scale = column[rows].astype(np.float32)

    if not (scale > 0).all():
        raise CouplerError(
            f"a temperature of {scale.min()} has no log-probabilities: they are those of the "
            "sampling distribution.\n"
            "  set:  sampling.temperature above 0"
        )
    return None if (scale == 1).all() else scale
