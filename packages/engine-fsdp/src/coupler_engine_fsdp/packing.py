"""From a ragged NumPy batch to one packed row of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coupler.balance import micro_batches, whole_units
from coupler.batch import Batch
from coupler.errors import CouplerError
from coupler_engine_fsdp.attention import Packing


@dataclass(frozen=True, slots=True)
class Packed:
    """What the model reads. No pytree: FSDP would cast its floats to the dtype of the parameters.

    ``rows`` are the tokens under ``loss_mask``; the hidden state of the token before each predicts it.
    """

    tokens: Tensor  # [1, N] int64
    positions: Tensor  # [1, N] int64, from 0 in each sequence
    packing: Packing
    rows: Tensor  # [R] int64
    targets: Tensor  # [R] int64
    temperature: Tensor | None  # [R] fp32; None is 1 everywhere


def pack(batch: Batch, device: torch.device) -> Packed:
    """Pack the sequences of ``batch``; one without tokens becomes two dummy tokens of which none is predicted.

    Raises:
        CouplerError: a temperature is not above 0, or a sequence's first token is under ``loss_mask``.
    """
    lengths = batch.lengths[batch.lengths > 0] if batch.num_tokens else np.array([2])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens = batch["tokens"].astype(np.int64) if batch.num_tokens else np.zeros(2, np.int64)
    rows = np.flatnonzero(batch["loss_mask"])
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    if len(rows) and positions[rows].min() == 0:
        raise CouplerError("loss_mask is true on the first token of a sequence, which nothing predicts.")

    scale = _temperature(batch, rows)
    return Packed(
        tokens=_tensor(tokens, device)[None],
        positions=_tensor(positions, device)[None],
        packing=Packing(tuple(lengths.tolist()), int(lengths.max()), _tensor(starts.astype(np.int32), device)),
        rows=_tensor(rows, device),
        targets=_tensor(tokens[rows], device),
        temperature=None if scale is None else _tensor(scale, device),
    )


def _tensor(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy to the device; what it still computes is not waited for, which pageable memory would."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _temperature(batch: Batch, rows: np.ndarray) -> np.ndarray | None:
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


def columns(batch: Batch, device: torch.device) -> dict[str, Any]:
    """Every numeric column as a tensor, and what says which row belongs to which sequence."""
    arrays = {
        name: column for name, column in (*batch.tokens.items(), *batch.seqs.items()) if column.dtype.kind in "biuf"
    }
    arrays["seq"] = np.repeat(np.arange(len(batch)), batch.lengths)
    arrays["cu_seqlens"] = batch.starts
    return {"num_seqs": len(batch), **{name: _tensor(array, device) for name, array in arrays.items()}}


def split(batch: Batch, max_tokens: int) -> list[np.ndarray]:
    """Row sets of micro-batches of ``max_tokens`` at most; rows that share a ``unit`` stay together.

    Raises:
        ValueError: one unit alone is longer.
    """
    if "unit" not in batch.seqs:
        return micro_batches(batch.lengths, max_tokens)
    return whole_units(batch.lengths, batch["unit"], lambda sizes: micro_batches(sizes, max_tokens))
