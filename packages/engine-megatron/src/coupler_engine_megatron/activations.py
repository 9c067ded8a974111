"""Count the activations of one of Megatron's layers.

The counts are those of arXiv 2205.05198, section 4, for gated layers, grouped heads and
attention that keeps no scores. Without Transformer Engine, as on the CPU, more is kept.

Letters: h hidden, a channels of all heads, g those of keys, i intermediate columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from coupler.engine_kit.memory_plan import Asked
from coupler_engine_megatron.config import MegatronConfig, Recompute
from coupler_engine_megatron.layout import experts_of

NORM = 4
"""Bytes of a number in a norm of plain PyTorch."""


@dataclass(frozen=True)
class Layer:
    """The bytes that one layer keeps of a micro-batch on one rank.

    Attributes:
        tokens: those of this rank's part of the sequences.
        width: bytes of a number of the dtype that computes.
        routes: whether the layer has experts.
    """

    config: MegatronConfig
    asked: Asked
    tokens: int
    width: int
    routes: bool

    @cached_property
    def hidden(self) -> int:
        return self.asked.shape["hidden_size"]

    @cached_property
    def fused(self) -> bool:
        """Transformer Engine and Megatron's own kernels compute."""
        return self.asked.gpu and self.width == 2

    @cached_property
    def entry(self) -> int:
        """Return the bytes of a layer's input."""
        config = self.config
        split = config.tensor_parallel if config.sequence_parallel else 1
        return self.tokens * self.hidden * self.width // split

    @cached_property
    def heads(self) -> tuple[int, int]:
        """Return the channels of this rank's queries, and of its keys."""
        shape, tensor = self.asked.shape, self.config.tensor_parallel
        heads = shape["num_attention_heads"]
        each = shape.get("head_dim") or self.hidden // heads
        if shape.get("qk_nope_head_dim"):
            each = shape["qk_nope_head_dim"] + shape["qk_rope_head_dim"]
        groups = shape.get("num_key_value_heads") or heads
        return heads * each // tensor, max(groups // tensor, 1) * each

    @cached_property
    def columns(self) -> tuple[int, int]:
        """Return the intermediate columns of this rank for each token, and the
        channels of tokens that were sent to experts.
        """
        shape, config = self.asked.shape, self.config
        wide = shape["intermediate_size"]
        if not self.routes:
            return wide // config.tensor_parallel, 0
        each = shape.get("moe_intermediate_size") or wide
        chosen = shape.get("num_experts_per_tok") or shape.get("num_experts_per_token") or 1
        shared = (shape.get("n_shared_experts") or 0) * each // config.tensor_parallel
        # Ranks that split the tokens of a sequence send only their own.
        split = config.tensor_parallel if config.sequence_parallel else 1
        sent = chosen * config.expert_tensor_parallel / split
        columns = sent * each / config.expert_tensor_parallel + shared
        assert experts_of(shape), "a layer that routes has experts"
        return int(columns), int(sent * self.hidden)

    @cached_property
    def saved(self) -> int:
        """Return the bytes that the backward pass reads."""
        return sum(self._parts().values()) - self.again

    @cached_property
    def again(self) -> int:
        """Return the bytes of the parts that the backward pass computes again."""
        if self.config.gradient_checkpointing != Recompute.SELECTIVE:
            return 0
        parts = self._parts()
        return sum(parts.get(name, 0) for name in self.config.recompute_modules)

    def _parts(self) -> dict[str, int]:
        """Return them by the module that can compute them again."""
        (queries, keys), (columns, sent), entry = self.heads, self.columns, self.entry
        each = self.tokens * self.width

        # The two sums that enter the norms, and what leaves these.
        parts = {"input": 2 * entry, "layernorm": 2 * entry}
        if self.fused:
            # The fused product, rotated queries and keys, and the result.
            parts["attention"] = each * (3 * queries + 3 * keys)
            parts["mlp"] = each * (3 * columns + sent)
            return parts

        # A norm keeps its input and the normed rows in fp32. Keys and values are
        # repeated for every head, and the gate is kept before and after its function.
        own = self.width == NORM
        parts["input"] = (1 if own else 0) * 2 * entry
        parts["norms"] = (2 if own else 4) * entry * NORM // self.width
        parts["attention"] = each * 5 * queries + 4 * each * keys // self._groups()
        parts["mlp"] = each * (5 * columns + sent)
        return parts

    def _groups(self) -> int:
        shape = self.asked.shape
        groups = shape.get("num_key_value_heads") or shape["num_attention_heads"]
        return max(groups // self.config.tensor_parallel, 1)

    @cached_property
    def working(self) -> int:
        """Return the bytes of gradients at the layer's widest point."""
        columns, sent = self.columns
        return self.tokens * self.width * (2 * columns + 4 * sent) + 2 * self.entry

    @cached_property
    def passing(self) -> int:
        """Return the bytes of the layer's widest point in a pass without gradient."""
        columns, sent = self.columns
        wide = (3 if self.fused else 5) * columns + 2 * sent
        return self.tokens * self.width * wide + 3 * self.entry
