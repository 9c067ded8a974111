"""Compute causal attention over packed sequences in plain PyTorch.

It is used without Transformer Engine, and in fp32. Under context parallelism a rank
holds two of the 2 x cp equal chunks of each sequence, one from either end, so that all
have as much to do. It gathers the keys and values of the others. Its gradient of them
goes back as a sum.

Shapes: t local tokens, h heads, g key-value heads, d channels.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from coupler_engine_megatron import groups


class PackedAttention(MegatronModule):
    """Attention for a layer's specification, as its ``core_attention``."""

    def __init__(
        self, config: TransformerConfig, softmax_scale: float | None = None, **unused: Any
    ) -> None:
        super().__init__(config)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> Tensor:
        """Attend with [t, h, d], [t, g, d], [t, g, d'] -> [t, h * d']."""
        assert packed_seq_params is not None, "the engine packs every batch"
        group = groups.context()
        size, rank = group.size(), group.rank()
        edges = packed_seq_params.cu_seqlens_q.tolist()  # of whole sequences
        # The keys and values of all ranks are [cp, t, g, d].
        if size > 1:
            key, value = _Gather.apply(key, group), _Gather.apply(value, group)

        done = []
        for start, end in pairwise(edges):
            part = slice(start // size, end // size)
            if size == 1:
                done.append(self._attend(query[part], key[part], value[part], None))
                continue
            order = torch.cat([positions(end - start, size, r) for r in range(size)]).argsort()
            keys, values = (x[:, part].flatten(0, 1)[order.to(x.device)] for x in (key, value))
            own = positions(end - start, size, rank).to(query.device)
            mask = own[:, None] >= torch.arange(end - start, device=query.device)
            done.append(self._attend(query[part], keys, values, mask))
        return torch.cat(done).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale
        )
        return out[0].transpose(0, 1)


def positions(length: int, size: int, rank: int) -> Tensor:
    """Return [length / size] which tokens of a sequence a context-parallel rank holds.

    They are in the rank's order.
    """
    chunk = length // (2 * size)
    last = 2 * size - 1 - rank
    return torch.cat([torch.arange(c * chunk, (c + 1) * chunk) for c in (rank, last)])


class _Gather(torch.autograd.Function):
    """Gather [t, ...] as [ranks, t, ...]. The gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(whole, part.contiguous(), group=group)
        return torch.stack(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.group.rank()], None
