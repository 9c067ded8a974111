"""Bring columns of a batch to the device of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from coupler.batch import Batch
from coupler.batch.columns import loss_columns

if TYPE_CHECKING:
    import torch


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy to the device without a wait for what it still computes.

    A copy from pageable memory would wait, so that the values are pinned first.
    """
    import torch

    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def columns(batch: Batch, device: torch.device) -> dict[str, Any]:
    """Return the columns that a loss reads, on the device."""
    arrays = loss_columns(batch)
    return {
        "num_seqs": len(batch),
        **{name: to_device(array, device) for name, array in arrays.items()},
    }
