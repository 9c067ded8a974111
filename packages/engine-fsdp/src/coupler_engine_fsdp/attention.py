"""Causal attention over packed sequences: no padding, no N x N mask, no token sees another sequence.

N tokens of B sequences stand in one row; each kernel gets where the sequences begin.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from coupler.errors import CouplerError
from coupler_engine_fsdp.attention_flash4 import HEAD_DIMS, flash_4

NAME = "coupler_varlen"  # transformers builds no mask for a name that it does not know
# torch 2.11 takes grouped heads as they are; later versions want to be told
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # arguments that change what attention computes


def _installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


FLASH_2 = _installed("flash-attn")
FLASH_4 = _installed("flash-attn-4") and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the sequences of a packed row are; travels to every layer as the keyword ``packing``.

    A compiled layer reads ``longest`` and ``cu_seqlens`` only: what it reads of ``lengths`` it would be compiled for.
    """

    lengths: tuple[int, ...]  # host copy: sizes of what is launched must not wait for the device
    longest: int
    cu_seqlens: Tensor  # [B + 1] int32 on the device

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(length, count) of neighbours that are equally long."""
        return [(length, len(list(same))) for length, same in groupby(self.lengths)]


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
    if query.is_cuda and query.dtype == torch.bfloat16 and query.shape[-1] % 8 == 0:
        out = _fused(query, key, value, packing, scaling, sliding_window)
    else:
        out = _by_length(query, key, value, packing, scaling, sliding_window)
    return out, None


def _fused(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, heads, D]
    ends, longest = packing.cu_seqlens, packing.longest
    if FLASH_4 and query.shape[-1] in HEAD_DIMS:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return flash_4(query, key, value, ends, longest, scaling, window or 0)[0][None]
    reach = (-1 if window is None else window - 1, 0)  # a window of w tokens holds the token itself
    if FLASH_2:
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

        out = flash_attn_varlen_func(
            query, key, value, ends, ends, longest, longest, softmax_scale=scaling, causal=True, window_size=reach
        )
    else:
        out: Any = varlen_attn(
            query, key, value, ends, ends, longest, longest, scale=scaling, window_size=reach, **_GROUPED
        )
    return out[None]


@torch.compiler.disable()  # it is written for these lengths
def _by_length(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    """One call per run of equally long sequences: no padding, and few calls where sequences are many and short."""
    gqa = query.shape[1] != key.shape[1]
    sizes = [length * count for length, count in packing.runs]
    parts = (x.split(sizes, 2) for x in (query, key, value))
    outs = []
    for (length, count), *qkv in zip(packing.runs, *parts, strict=True):
        q, k, v = (x[0].unflatten(1, (count, length)).transpose(0, 1) for x in qkv)  # [count, heads, length, D]
        band = None
        if window is not None and length > window:
            band = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        out = scaled_dot_product_attention(q, k, v, band, is_causal=band is None, scale=scaling, enable_gqa=gqa)
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)[None]
