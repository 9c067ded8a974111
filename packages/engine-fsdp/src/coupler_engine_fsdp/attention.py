"""Causal attention over packed sequences: no padding, no N x N mask, no token sees another sequence.

N tokens of B sequences stand in one row; each kernel gets where the sequences begin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from inspect import signature
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from coupler.errors import CouplerError

NAME = "coupler_varlen"  # transformers builds no mask for a name that it does not know
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # arguments that change what attention computes


@dataclass(frozen=True, slots=True)
class Packing:
    """Which pieces a packed row consists of; travels to every layer as the keyword ``packing``.

    The queries of a piece are the last of its keys: all of them, or what follows a prompt that other pieces share.
    """

    lengths: tuple[tuple[int, int], ...]  # (queries, keys) of each; on the host: launching must not wait for the device
    cu_queries: Tensor  # [P + 1] int32 on the device: where the queries of each begin
    cu_keys: Tensor  # [P + 1] int32
    keys: Tensor | None  # [K] int64: which token of the packed row each key is; None where keys are the queries

    @property
    def runs(self) -> list[tuple[tuple[int, int], int]]:
        """((queries, keys), count) of neighbours that are equally long."""
        return [(lengths, len(list(same))) for lengths, same in groupby(self.lengths)]


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
    """[1, heads, N, D] x [1, kv heads, N, D] -> [1, N, heads, D], as transformers calls it.

    There is no dropout, whatever the model's configuration says: a log-prob is one of the distribution that is sampled.

    Raises:
        CouplerError: the model attends in a way that is not computed here.
    """
    odd = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if packing is None or attention_mask is not None or odd or not getattr(module, "is_causal", True):
        what = f"uses {', '.join(odd)}" if odd else "is not causal self-attention over the packed row"
        raise CouplerError(f"engine=fsdp cannot run this model: the attention of {type(module).__name__} {what}.")
    if packing.keys is not None:
        key, value = (x.index_select(2, packing.keys) for x in (key, value))
    if query.is_cuda and query.dtype == torch.bfloat16 and query.shape[-1] % 8 == 0:
        out = _fused(query, key, value, packing, scaling, sliding_window)
    else:
        out = _by_length(query, key, value, packing, scaling, sliding_window)
    return out, None


def _fused(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, heads, D]
    ends, longest = (packing.cu_queries, packing.cu_keys), [max(sizes) for sizes in zip(*packing.lengths, strict=True)]
    reach = (-1 if window is None else window - 1, 0)  # a window of w tokens holds the token itself
    if _has_flash_attn():
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

        out = flash_attn_varlen_func(
            query, key, value, *ends, *longest, softmax_scale=scaling, causal=True, window_size=reach
        )
    else:
        from torch.nn.attention.varlen import varlen_attn

        grouped = _grouped(varlen_attn)
        out: Any = varlen_attn(query, key, value, *ends, *longest, scale=scaling, window_size=reach, **grouped)
    return out[None]


@cache
def _grouped(varlen_attn: Callable[..., Any]) -> dict[str, Any]:
    """torch 2.11 takes grouped heads as they are; later versions want to be told."""
    return {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


@cache
def _has_flash_attn() -> bool:
    return find_spec("flash_attn") is not None


def _by_length(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    """One call per run of equally long pieces: no padding, and few calls where pieces are many and short."""
    gqa = query.shape[1] != key.shape[1]
    queries = query.split([length * count for (length, _), count in packing.runs], 2)
    keys, values = (x.split([length * count for (_, length), count in packing.runs], 2) for x in (key, value))
    outs = []
    for ((last, length), count), q, k, v in zip(packing.runs, queries, keys, values, strict=True):
        q = q[0].unflatten(1, (count, last)).transpose(0, 1)  # [count, heads, last, D]
        k, v = (x[0].unflatten(1, (count, length)).transpose(0, 1) for x in (k, v))  # [count, heads, length, D]
        band = None
        if last < length or (window is not None and length > window):
            ones = torch.ones(last, length, dtype=torch.bool, device=q.device)
            band = ones.tril(length - last).triu(length - last + 1 - (window or length))
        out = scaled_dot_product_attention(q, k, v, band, is_causal=band is None, scale=scaling, enable_gqa=gqa)
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)[None]
