"""Pack a ragged NumPy batch into one row of tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coupler.batch import Batch
from coupler.batch.columns import TOP_IDS, temperature_of
from coupler.engine_kit import micro_batches
from coupler.engine_kit.sampling_mask import kept_ids
from coupler.engine_kit.tensors import to_device
from coupler.errors import CouplerError
from coupler_engine_fsdp.attention import Packing, Piece
from coupler_engine_fsdp.sequence import ALONE, Peers

SHARE_FROM = 0.1
"""Part of the tokens that must repeat in prompts: with fewer, gathering keys costs more
than sharing saves."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The tensors that the model reads.

    A prompt that several sequences begin with is there once, and tokens that predict
    nothing are not there. N is therefore smaller than the tokens of the batch. Of a row
    that peers hold together, N are this rank's tokens and R the ones that they predict.
    The class is no pytree, since FSDP would cast its floats to the dtype of the
    parameters.
    """

    tokens: Tensor
    """[1, N] int64"""
    positions: Tensor
    """[1, N] int64, from 0 in each sequence"""
    packing: Packing
    rows: Tensor
    """[R] int64: the tokens of the batch under ``loss_mask`` that are predicted here"""
    sources: Tensor
    """[R] int64: the place in N of the token before each, which predicts it"""
    targets: Tensor
    """[R] int64"""
    temperature: Tensor | None
    """[R] fp32, or None for 1 everywhere"""
    kept: Tensor | None
    """[R, kept] int64: the ids that each target was sampled among, or None for all"""
    ids: Tensor | None = None
    """[R, k] int64: further ids whose log-probs are wanted, with -1 for none"""
    top_k: int = 0
    """The number of most likely ids that are wanted."""

    def spread(self, values: Tensor, num_tokens: int) -> Tensor:
        """Put values [R, ...] in the places of their tokens: [num_tokens, ...].

        The others are 0. No gradient, and so no NaN, gets in or out of the zeros.
        """
        zeros = values.new_zeros(num_tokens, *values.shape[1:])
        return zeros.index_copy(0, self.rows, values)


def pack(batch: Batch, device: torch.device, peers: Peers = ALONE) -> Packed:
    """Pack the sequences of ``batch``, and take this rank's part of the row.

    A token is predicted on the rank that holds the one before it, so that the first
    token of a part belongs to the part before. A batch without tokens becomes two dummy
    tokens, of which none is predicted.

    Raises:
        CouplerError: a temperature is not above 0, or a sequence's first token is under
            ``loss_mask``.
    """
    if batch.num_tokens:
        tokens = batch["tokens"].astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(batch.lengths[batch.lengths > 0])])
    else:
        tokens, starts = np.zeros(2, np.int64), np.array([0, 2])
    rows = np.flatnonzero(batch["loss_mask"])
    if np.isin(rows, starts).any():
        raise CouplerError(
            "loss_mask is true on the first token of a sequence, which nothing predicts."
        )

    prompts = _prompts(starts, rows)
    owners = _owners(tokens, starts, prompts)
    begin, end, sequences = _pieces(starts, _ends(starts, rows), prompts, owners)
    taken = _ranges(begin, end)

    place = _places(starts, prompts, owners, taken)
    within = np.arange(len(tokens)) - np.repeat(starts[:-1], np.diff(starts))

    edges = np.concatenate([[0], np.cumsum(end - begin)])
    prompt = place[starts[sequences]]
    pieces = np.stack(
        [
            edges[:-1],
            edges[1:],
            prompt,
            prompt + begin - starts[sequences],
        ],
        axis=1,
    )

    # What fills the row up attends to itself alone, and nothing reads it.
    total, fill = len(taken), -len(taken) % peers.size
    if fill:
        pieces = np.concatenate([pieces, [[total, total + fill, total, total]]])
    first, last = peers.part(total + fill)
    ids = np.pad(tokens[taken], (0, fill))
    positions = np.concatenate([within[taken], np.arange(fill)])

    sources = place[rows - 1]
    held = np.flatnonzero((sources >= first) & (sources < last))
    scale = temperature_of(batch, rows)
    kept = kept_ids(batch, rows[held])
    asked = batch[TOP_IDS][rows[held]].astype(np.int64) if batch.has(TOP_IDS) else None

    def tensor(values: np.ndarray) -> Tensor:
        return to_device(values, device)

    return Packed(
        tokens=tensor(ids[first:last])[None],
        positions=tensor(positions[first:last])[None],
        packing=Packing.of(
            [Piece(*piece) for piece in pieces.tolist()],
            device,
            peers,
        ),
        rows=tensor(rows[held]),
        sources=tensor(sources[held] - first),
        targets=tensor(tokens[rows[held]]),
        temperature=None if scale is None else tensor(scale[held]),
        kept=None if kept is None else tensor(kept),
        ids=None if asked is None else tensor(asked),
    )


def _places(
    starts: np.ndarray, prompts: np.ndarray, owners: np.ndarray, taken: np.ndarray
) -> np.ndarray:
    """Return the place of each token in the row.

    A shared prompt stands with its owner.
    """
    place = np.empty(starts[-1], np.int64)
    place[taken] = np.arange(len(taken))

    again = np.flatnonzero(owners != np.arange(len(owners)))
    copies, originals = (
        _ranges(starts[i], starts[i] + prompts[again]) for i in (again, owners[again])
    )
    place[copies] = place[originals]
    return place


def _prompts(starts: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return how many tokens of each sequence come before its first predicted one.

    They are all of them if none is predicted.
    """
    first = np.append(rows, starts[-1])[np.searchsorted(rows, starts[:-1])]
    return np.minimum(first, starts[1:]) - starts[:-1]


def _ends(starts: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the last predicted token of each sequence, which predicts nothing.

    It is the sequence's end if none is predicted.
    """
    before = np.searchsorted(rows, starts)
    last = np.append(rows, -1)[before[1:] - 1]
    return np.where(before[1:] > before[:-1], last, starts[1:])


def _owners(tokens: np.ndarray, starts: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """Return for each sequence the first one with the same prompt.

    It is the sequence itself if sharing would save too little.
    """
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
    """Return begin, end and sequence of each piece.

    A piece is a whole sequence, or a shared prompt, or the rest of a sequence after it.
    """
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

    # Each prompt comes just before the pieces that follow it.
    order = np.lexsort((begin > starts[sequence], owners[sequence]))
    return begin[order], end[order], sequence[order]


def _ranges(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the indices from each ``begin`` to its ``end``, range after range."""
    sizes = end - begin
    return np.arange(sizes.sum()) + np.repeat(begin - (np.cumsum(sizes) - sizes), sizes)


def split(batch: Batch, max_tokens: int) -> list[np.ndarray]:
    """Cut into micro-batches of ``max_tokens`` at most.

    Rows that share a ``unit`` stay together. So do those of a prompt ``group``, if that
    makes one micro-batch more at most: their prompt is then computed once.

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
