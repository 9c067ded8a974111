"""Pack a ragged NumPy batch into one row, in Megatron-Core's ``thd`` layout."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from coupler.batch import Batch
from coupler.batch.columns import temperature_of
from coupler.engine_kit.sampling_mask import kept_ids
from coupler.errors import CouplerError
from coupler_engine_megatron.attention import positions
from coupler_engine_megatron.routing import Params


@dataclass(frozen=True, slots=True)
class Alignment:
    """Numbers that lengths must be multiples of.

    Filling up costs time and changes no result, since nothing reads these tokens.
    """

    sequence: int
    """Two chunks for each context-parallel rank."""
    total: int
    """As many tokens on each tensor-parallel rank, if these ranks split the tokens."""

    @staticmethod
    def of(context_parallel: int, split_tokens: int) -> Alignment:
        sequence = 2 * context_parallel if context_parallel > 1 else 1
        return Alignment(sequence, sequence * split_tokens)


@dataclass(frozen=True, slots=True)
class Packed:
    """One micro-batch on one rank.

    The packed row has N tokens, of which this context-parallel rank holds N / cp.
    """

    batch: Batch
    tokens: Tensor
    """[1, N / cp] int64"""
    positions: Tensor
    """[1, N / cp] int64, from 0 in each sequence"""
    params: Params
    rows: Tensor
    """[R] int64: the tokens of the batch under ``loss_mask``, which are predicted"""
    sources: Tensor
    """[L] int64: the place in N / cp of the token before each, if this rank has it"""
    places: Tensor
    """[L] int64: the place of these in R"""
    targets: Tensor
    """[L] int64"""
    temperature: Tensor | None
    """[L] fp32, or None for 1 everywhere"""
    kept: Tensor | None
    """[L, kept] int64: the ids that each target was sampled among, or None for all"""
    held: np.ndarray
    """[N / cp] the token of the batch at each place, or -1 for one that fills up"""

    @property
    def num_rows(self) -> int:
        return len(self.rows)


def pack(batch: Batch, device: torch.device, align: Alignment, size: int, rank: int) -> Packed:
    """Pack the sequences of ``batch`` for one of ``size`` context-parallel ranks.

    Raises:
        CouplerError: a temperature is not above 0, or a sequence's first token is under
            ``loss_mask``.
    """
    lengths = batch.lengths[batch.lengths > 0]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    rows = np.flatnonzero(batch["loss_mask"])
    if np.isin(rows, starts).any():
        raise CouplerError(
            "loss_mask is true on the first token of a sequence, which nothing predicts."
        )

    # The place of each token of the batch, and the token at each place.
    edges = _edges(lengths, align)
    shifts = np.repeat(edges[: len(lengths)] - starts[:-1], lengths)
    place = np.arange(len(batch["tokens"])) + shifts
    within = np.arange(edges[-1]) - np.repeat(edges[:-1], np.diff(edges))
    tokens, row = np.zeros(edges[-1], np.int64), np.full(edges[-1], -1)
    tokens[place], row[place] = batch["tokens"], np.arange(len(place))

    # This rank's part of the row.
    held = np.arange(edges[-1]) if size == 1 else _held(edges, size, rank)
    local = np.full(edges[-1], -1)
    local[held] = np.arange(len(held))
    sources = local[place[rows - 1]]
    mine = np.flatnonzero(sources >= 0)

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    scale, kept = temperature_of(batch, rows), kept_ids(batch, rows)
    return Packed(
        batch=batch,
        tokens=tensor(tokens[held])[None],
        positions=tensor(within[held])[None],
        params=_params(edges, device),
        rows=tensor(rows),
        sources=tensor(sources[mine]),
        places=tensor(mine),
        targets=tensor(batch["tokens"][rows[mine]].astype(np.int64)),
        temperature=None if scale is None else tensor(scale[mine]),
        kept=None if kept is None else tensor(kept[mine]),
        held=row[held],
    )


def _edges(lengths: np.ndarray, align: Alignment) -> np.ndarray:
    """Return where each sequence begins in the row, and where the row ends.

    A last piece fills the row up, also that of an empty batch.
    """
    sizes = -(-lengths // align.sequence) * align.sequence
    rest = -int(sizes.sum()) % align.total if len(sizes) else max(align.total, 2)
    return np.concatenate([[0], np.cumsum([*sizes, *([rest] if rest else [])])]).astype(np.int64)


def _held(edges: np.ndarray, size: int, rank: int) -> np.ndarray:
    """Return which tokens of the row a context-parallel rank holds, in its order."""
    pieces = [
        start + positions(int(end - start), size, rank).numpy() for start, end in pairwise(edges)
    ]
    return np.concatenate(pieces)


def _params(edges: np.ndarray, device: torch.device) -> Params:
    cumulative = torch.from_numpy(edges.astype(np.int32)).to(device)
    longest = int(np.diff(edges).max())
    return Params(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
