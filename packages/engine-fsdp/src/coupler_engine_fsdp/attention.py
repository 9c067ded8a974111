"""Compute causal attention over packed sequences, which see nothing of each other.

N tokens of B sequences stand in one row, without padding and without an N x N mask.
Each kernel is told where the sequences begin.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from coupler.engine_kit.tensors import to_device
from coupler.errors import CouplerError
from coupler_engine_fsdp.attention_cudnn import CUDNN, LONG, MOST_HEAD_DIM, by_sequence
from coupler_engine_fsdp.attention_flash4 import HEAD_DIMS, flash_4
from coupler_engine_fsdp.optional import is_usable
from coupler_engine_fsdp.sequence import ALONE, Peers

NAME = "coupler_varlen"
"""Transformers builds no mask for a name that it does not know."""
# torch 2.11 takes grouped heads as they are. Later versions want to be told.
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
)
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments that change what attention computes."""
LOCAL = ("sliding_attention", "chunked_attention")
"""Transformers' names of layers whose tokens do not see all that came before."""


FLASH_2 = torch.cuda.is_available() and is_usable("flash-attn", "flash_attn")
FLASH_4 = (
    torch.cuda.is_available()
    and torch.cuda.get_device_capability()[0] >= 9
    and is_usable("flash-attn-4", "flash_attn.cute.interface")
)


class Piece(NamedTuple):
    """Tokens of a packed row that attend causally to themselves and to a prompt's
    tokens.

    The prompt may have none.
    """

    begin: int
    end: int
    prompt_begin: int
    prompt_end: int


@dataclass(frozen=True)
class Packing:
    """The pieces of a packed row, which every layer gets as the keyword ``packing``.

    A compiled layer reads only the tensors, ``longest`` and ``are_long``. If it read
    ``pieces``, it would be compiled for these pieces only.
    """

    pieces: tuple[Piece, ...]
    """The pieces on the host, since a launch must not wait for the device."""
    cu_queries: Tensor
    """[P + 1] int32 on the device: where the queries of each piece begin"""
    cu_keys: Tensor
    """[P + 1] int32: where the keys of each piece begin"""
    keys: Tensor | None
    """[K] int64: the token that each key is of, or None if every token is one key"""
    longest: tuple[int, int]
    """Most queries and most keys of a piece."""
    are_long: bool
    """True where pieces are so few and long that each may have a call of its own."""
    peers: Peers = ALONE
    """The ranks that each hold a part of the row"""
    _masks: dict[tuple[int | None, torch.dtype], list[Tensor | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, pieces: Sequence[Piece], device: torch.device, peers: Peers = ALONE) -> Packing:
        """Lay out ``pieces``, which stand in the order of the row."""
        queries = np.array([piece.end - piece.begin for piece in pieces], np.int64)
        outside = np.array([piece.prompt_end - piece.prompt_begin for piece in pieces], np.int64)
        keys = queries + outside

        cu_queries, cu_keys = (
            to_device(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32), device)
            for sizes in (queries, keys)
        )

        # Each piece has two ranges of keys, the prompt's and its own.
        index = None
        if outside.any():
            begins = np.array([[p.prompt_begin, p.begin] for p in pieces], np.int64).reshape(-1)
            sizes = np.stack([outside, queries], 1).reshape(-1)
            ends = sizes.cumsum()
            index = to_device(np.repeat(begins - ends + sizes, sizes) + np.arange(ends[-1]), device)

        longest = int(queries.max()), int(keys.max())
        are_long = index is None and bool(queries.mean() >= LONG)
        return cls(tuple(pieces), cu_queries, cu_keys, index, longest, are_long, peers)

    @cached_property
    def blocks(self) -> list[Block]:
        """The row cut into calls of dense attention, in order."""
        blocks, families = [], _families(self.pieces)
        while families:
            family = families.pop(0)
            while families and families[0][-1].end - family[0].begin <= BLOCK:
                family += families.pop(0)
            for part in _parts(family):
                blocks.append(Block(part[0].begin, part[-1].end, _reach(part), *part[0][2:]))
        return blocks

    def masks(self, window: int | None, dtype: torch.dtype) -> list[Tensor | None]:
        """Return what is added to the scores of each block, -inf for an unseen key.

        It is built once for all layers.
        """
        if (window, dtype) not in self._masks:
            self._masks[window, dtype] = [
                self._mask(block.reach, window, dtype) for block in self.blocks
            ]
        return self._masks[window, dtype]

    def _mask(
        self, reach: np.ndarray | None, window: int | None, dtype: torch.dtype
    ) -> Tensor | None:
        if reach is None:
            return None
        seen = (reach >= 0) & (reach < window) if window else reach >= 0
        scores = np.where(seen, np.float32(0), np.float32(-np.inf))
        return to_device(scores, self.cu_queries.device).to(dtype)


BLOCK = 128
"""Most tokens of a call that shorter pieces share. Their masked products cost less than
further calls."""


class Block(NamedTuple):
    """Queries ``begin`` to ``end`` with their own keys, after the keys of a prompt."""

    begin: int
    end: int
    reach: np.ndarray | None
    """[queries, keys]: how many tokens back each key is, or -1 if it is unseen. None is
    plainly causal."""
    prompt_begin: int = 0
    prompt_end: int = 0


def _families(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Group each prompt with the pieces behind it that attend to it."""
    families: list[list[Piece]] = []
    for piece in pieces:
        if piece.prompt_begin == piece.prompt_end:
            families.append([])
        families[-1].append(piece)
    return families


def _parts(family: Sequence[Piece]) -> list[list[Piece]]:
    """Cut so that no part but a single piece has more than ``BLOCK`` tokens."""
    parts: list[list[Piece]] = []
    for piece in family:
        if not parts or piece.end - parts[-1][0].begin > BLOCK:
            parts.append([])
        parts[-1].append(piece)
    return parts


def _reach(pieces: list[Piece]) -> np.ndarray | None:
    """Return which keys of their block the pieces see, as :class:`Block` has it.

    A piece that is alone in its block has its prompt before it.
    """
    if len(pieces) == 1 and pieces[0].prompt_begin == pieces[0].prompt_end:
        return None

    begin, end = pieces[0].begin, pieces[-1].end
    outside = pieces[0].prompt_end - pieces[0].prompt_begin
    size = end - begin
    seen = np.full((size, outside + size), -1)

    for piece in pieces:
        rows = slice(piece.begin - begin, piece.end - begin)
        length, prompt = piece.end - piece.begin, piece.prompt_end - piece.prompt_begin
        back = np.arange(prompt, prompt + length)[:, None] - np.arange(prompt + length)
        first = 0 if outside else piece.prompt_begin - begin
        seen[rows, first : first + prompt] = back[:, :prompt]
        seen[rows, outside + rows.start : outside + rows.stop] = np.maximum(back[:, prompt:], -1)
    return seen


def register() -> None:
    """Make ``attn_implementation="coupler_varlen"`` known to transformers."""
    AttentionInterface.register(NAME, packed_attention)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend [1, heads, N, D] x [1, kv heads, N, D] -> [1, N, heads, D] for
    transformers.

    Where peers hold the row, N is this rank's part. Attention is then over the whole
    row, with this rank's part of the heads.

    There is no dropout, whatever the model's configuration says: a log-prob is one of
    the distribution that is sampled.

    Raises:
        CouplerError: the model attends in a way that is not computed here.
    """
    odd = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    causal = getattr(module, "is_causal", True)
    local = getattr(module, "attends_locally", False) and sliding_window is None
    if packing is None or attention_mask is not None or odd or not causal or local:
        what = "is not causal self-attention over the packed row"
        if odd:
            what = f"uses {', '.join(odd)}"
        elif local:
            what = "is local by its configuration, and asks for no window"
        raise CouplerError(
            f"engine=fsdp cannot run this model: the attention of {type(module).__name__} {what}."
        )

    peers = packing.peers
    if peers.size > 1:
        query, key, value = peers.to_heads(query, key, value)

    if query.is_cuda and query.dtype == torch.bfloat16 and query.shape[-1] % 8 == 0:
        out = _fused(query, key, value, packing, scaling, sliding_window)
    else:
        out = _by_block(query, key, value, packing, scaling, sliding_window)
    return (peers.to_tokens(out) if peers.size > 1 else out), None


def mark_local(causal: nn.Module) -> None:
    """Mark each module that its configuration gives a window or chunks.

    Some families have it in the mask alone, which is not built for packed rows. A
    compiled layer must not read its own index, else each would be compiled anew.
    """
    modules: list[Any] = list(causal.modules())
    for module in modules:
        kinds = getattr(getattr(module, "config", None), "layer_types", None)
        index = getattr(module, "layer_idx", None)
        if kinds and index is not None and kinds[index] in LOCAL:
            module.attends_locally = True


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    # Only PyTorch's kernel for packed rows heeds a request to be deterministic.
    free, size = not torch.are_deterministic_algorithms_enabled(), query.shape[-1]
    by_flash_4 = FLASH_4 and free and size in HEAD_DIMS
    by_cudnn = CUDNN and free and packing.are_long and window is None and size <= MOST_HEAD_DIM
    if by_cudnn and not by_flash_4:
        return by_sequence(query, key, value, packing, scaling)

    if packing.keys is not None:
        key, value = (x.index_select(2, packing.keys) for x in (key, value))
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, heads, D]
    ends, longest = (packing.cu_queries, packing.cu_keys), packing.longest

    if by_flash_4:
        scaling = size**-0.5 if scaling is None else scaling
        return flash_4(query, key, value, *ends, *longest, scaling, window or 0)[0][None]

    # A window of w tokens holds the token itself.
    reach = (-1 if window is None else window - 1, 0)
    if FLASH_2 and free:
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

        out = flash_attn_varlen_func(
            query,
            key,
            value,
            *ends,
            *longest,
            softmax_scale=scaling,
            causal=True,
            window_size=reach,
        )
    else:
        out: Any = varlen_attn(
            query, key, value, *ends, *longest, scale=scaling, window_size=reach, **_GROUPED
        )
    return out[None]


class _Cut:
    """A row [1, heads, N, D] in parts.

    Slices of it would each have a gradient as long as the row.
    """

    def __init__(self, row: Tensor, cuts: list[int]) -> None:
        """Cut at ``cuts``, which rise from 0. The last part ends with the row."""
        self.cuts = [*cuts, row.shape[2]]
        self.parts = row.split([end - begin for begin, end in pairwise(self.cuts)], 2)

    def ranges(self, *ranges: tuple[int, int]) -> Tensor:
        """Return the tokens of each range, which begins and ends at a cut."""
        found = [p for begin, end in ranges for p in self.parts[self._at(begin) : self._at(end)]]
        return torch.cat(found, 2) if len(found) > 1 else found[0]

    def _at(self, token: int) -> int:
        return bisect_left(self.cuts, token)


@torch.compiler.disable()  # A compiled one would be for these lengths only.
def _by_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Attend with one call per block.

    There is no padding, and there are few calls even if sequences are many and short.
    """
    gqa = query.shape[1] != key.shape[1]
    outs = []
    edges = {
        edge
        for block in packing.blocks
        for edge in (block.begin, block.prompt_begin, block.prompt_end)
    }
    cuts = sorted(edges)
    keys, values = _Cut(key, cuts), _Cut(value, cuts)
    queries = query.split([block.end - block.begin for block in packing.blocks], 2)
    masks = packing.masks(window, query.dtype)

    for block, q, mask in zip(packing.blocks, queries, masks, strict=True):
        k, v = (
            x.ranges((block.prompt_begin, block.prompt_end), (block.begin, block.end))
            for x in (keys, values)
        )
        length = block.end - block.begin
        if mask is None and window is not None and length > window:
            seen = torch.ones(length, length, dtype=torch.bool, device=q.device)
            mask = seen.tril().triu(1 - window)
        out = scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa
        )
        outs.append(out.transpose(1, 2))
    return torch.cat(outs, 1)
