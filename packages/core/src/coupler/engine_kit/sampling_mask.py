"""Leave to a distribution the ids that a token was sampled among.

See DeepSeek-AI 2025, arXiv 2512.02556, section 3.1, "Keep Sampling Mask".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from coupler.batch import Batch
from coupler.batch.columns import SAMPLING_MASK

if TYPE_CHECKING:
    import torch

# The probability of such a logit is 0, in fp64 too, and sums in fp64 lose nothing
# beside it.
CUT: Final = -1e6


def kept_ids(batch: Batch, rows: np.ndarray) -> np.ndarray | None:
    """Return the ids that the tokens at ``rows`` were sampled among, [R, kept] int64.

    None stands for all of them everywhere.
    """
    return batch[SAMPLING_MASK][rows].astype(np.int64) if batch.has(SAMPLING_MASK) else None


def cut_off(logits: torch.Tensor, kept: torch.Tensor | None, first: int) -> torch.Tensor:
    """Overwrite the logits of ids that are not kept with ``CUT``, and return all.

    Args:
        logits: [R, v], of the ids from ``first`` on.
        kept: [R, kept] int64, with -1 for no id. A row of -1 alone keeps all, and so
            does None.
    """
    if kept is None or not logits.shape[1]:
        return logits
    width = logits.shape[1]
    inside = (kept >= first) & (kept < first + width)
    index = (kept - first).clamp_(0, width - 1)
    left = logits.gather(1, index)
    left.masked_fill_(~inside, CUT)
    cuts = (kept >= 0).any(1, keepdim=True)
    logits.masked_fill_(cuts, CUT)
    # An id outside has the index of one inside, whose logit is higher than its own.
    return logits.scatter_reduce_(1, index, left, "amax")
