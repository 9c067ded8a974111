"""From a ragged NumPy batch to one packed row of tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coupler.batch import Batch
from coupler.batch.columns import temperature_of
from coupler.engine_kit import micro_batches
from coupler.engine_kit.tensors import to_device
from coupler.errors import CouplerError
from coupler_engine_fsdp.attention import Packing, Piece

SHARE_FROM = 0.1  # of the tokens: where fewer stand in prompts that repeat, gathering keys costs more than it saves


@dataclass(frozen=True, slots=True)
class Packed:
    """What the model reads. No pytree: FSDP would cast its floats to the dtype of the parameters.

    A prompt that several sequences begin with stands there once, and what nothing is predicted from does not: N is
    smaller than the tokens of the batch.
    """

    tokens: Tensor  # [1, N] int64
    positions: Tensor  # [1, N] int64, from 0 in each sequence
    packing: Packing
    rows: Tensor  # [R] int64: the tokens of the batch under ``loss_mask``, which are predicted
    sources: Tensor  # [R] int64: where in N the token before each stands, whose hidden state predicts it
    targets: Tensor  # [R] int64
    temperature: Tensor | None  # [R] fp32; None is 1 everywhere


def pack(batch: Batch, device: torch.device) -> Packed:
    """Pack the sequences of ``batch``; one without tokens becomes two dummy tokens of which none is predicted.

    Raises:
        CouplerError: a temperature is not above 0, or a sequence's first token is under ``loss_mask``.
    """
    tokens = batch["tokens"].astype(np.int64) if batch.num_tokens else np.zeros(2, np.int64)
    starts = (
        np.concatenate([[0], np.cumsum(batch.lengths[batch.lengths > 0])]) if batch.num_tokens else np.array([0, 2])
    )
    rows = np.flatnonzero(batch["loss_mask"])
    if np.isin(rows, starts).any():
        raise CouplerError("loss_mask is true on the first token of a sequence, which nothing predicts.")
    prompts = _prompts(starts, rows)
    owners = _owners(tokens, starts, prompts)
    begin, end, sequences = _pieces(starts, _ends(starts, rows), prompts, owners)
    taken = _ranges(begin, end)
    place = np.empty(len(tokens), np.int64)  # where each token stands in the row
    place[taken] = np.arange(len(taken))
    again = np.flatnonzero(owners != np.arange(len(owners)))  # sequences whose prompt stands with another one
    copies, originals = (_ranges(starts[i], starts[i] + prompts[again]) for i in (again, owners[again]))
    place[copies] = place[originals]
    positions = (np.arange(len(tokens)) - np.repeat(starts[:-1], np.diff(starts)))[taken]

    def tensor(values: np.ndarray) -> Tensor:
        return to_device(values, device)

    edges = np.concatenate([[0], np.cumsum(end - begin)])
    prompt = place[starts[sequences]]
    pieces = np.stack([edges[:-1], edges[1:], prompt, prompt + begin - starts[sequences]], axis=1)
    return Packed(
        tokens=tensor(tokens[taken])[None],
        positions=tensor(positions)[None],
        packing=Packing.of([Piece(*piece) for piece in pieces.tolist()], device),
        rows=tensor(rows),
        sources=tensor(place[rows - 1]),
        targets=tensor(tokens[rows]),
        temperature=None if (scale := temperature_of(batch, rows)) is None else tensor(scale),
    )


def _prompts(starts: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Tokens of each sequence before its first predicted one: all of them where none is predicted."""
    first = np.append(rows, starts[-1])[np.searchsorted(rows, starts[:-1])]
    return np.minimum(first, starts[1:]) - starts[:-1]


def _ends(starts: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The last predicted token of each sequence, which nothing is predicted from; its end where none is predicted."""
    before = np.searchsorted(rows, starts)
    last = np.append(rows, -1)[before[1:] - 1]
    return np.where(before[1:] > before[:-1], last, starts[1:])


def _owners(tokens: np.ndarray, starts: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """For each sequence the first one with the same prompt; itself where sharing would save too little."""
    first: dict[bytes, int] = {}
    owners = np.array(
        [
            first.setdefault(tokens[start : start + size].tobytes(), index)
            for index, (start, size) in enumerate(zip(starts, prompts, strict=False))
        ]
    )
    alone = np.arange(len(owners))
    return owners if prompts[owners != alone].sum() > SHARE_FROM * len(tokens) else alone


def _pieces(
    starts: np.ndarray, end: np.ndarray, prompts: np.ndarray, owners: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Begin, end and sequence of each piece: a whole sequence, or a prompt and then what follows it."""
    index = np.arange(len(owners))
    start, split = starts[:-1], starts[:-1] + prompts
    shared = np.bincount(owners, minlength=len(owners))[owners] > 1
    begin, end, sequence = np.concatenate(
        [
            np.stack([start, end, index])[:, ~shared],
            np.stack([start, split, index])[:, shared & (owners == index)],
            np.stack([split, end, index])[:, shared & (split < end)],
        ],
        axis=1,
    )
    order = np.lexsort((begin > starts[sequence], owners[sequence]))  # each prompt just before what follows it
    return begin[order], end[order], sequence[order]


def _ranges(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Indices from each ``begin`` to its ``end``, one range after the other."""
    sizes = end - begin
    return np.arange(sizes.sum()) + np.repeat(begin - (np.cumsum(sizes) - sizes), sizes)


def split(batch: Batch, max_tokens: int) -> list[np.ndarray]:
    """Cut into micro-batches of ``max_tokens`` at most; rows that share a ``unit`` stay together.

    So do those of a prompt ``group``, where that makes one micro-batch more at most: their prompt
    is then computed once.

    Raises:
        ValueError: one unit alone is longer.
    """
    parts = micro_batches.split(batch, max_tokens)
    if len(parts) > 1 and "group" in batch.seqs:
        groups = np.unique(batch["group"], return_inverse=True)[1]
        if np.bincount(groups, weights=batch.lengths).max() <= max_tokens:
            whole = micro_batches.split_by("group", batch, max_tokens)
            parts = whole if len(whole) <= len(parts) + 1 else parts
    return parts
