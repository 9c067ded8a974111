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

NORM = 4
"""Bytes of a number in a norm of plain PyTorch."""
NORMS_HEADS = ("qwen3", "qwen3_moe")
"""Model types that norm the queries and the keys of each head."""


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
        shape = self.asked.shape
        heads = shape["num_attention_heads"]
        each = shape.get("head_dim") or self.hidden // heads
        if shape.get("qk_nope_head_dim"):
            each = shape["qk_nope_head_dim"] + shape["qk_rope_head_dim"]

        queries = heads * each // self.config.tensor_parallel
        return queries, self.groups * each

    @cached_property
    def groups(self) -> int:
        """Return the key-value heads of this rank."""
        shape = self.asked.shape
        groups = shape.get("num_key_value_heads") or shape["num_attention_heads"]
        return max(groups // self.config.tensor_parallel, 1)

    @cached_property
    def columns(self) -> tuple[int, int]:
        """Return the intermediate columns of this rank for each token, and the
        channels of tokens that were sent to experts.
        """
        shape = self.asked.shape
        tensor = self.config.tensor_parallel
        wide = shape["intermediate_size"]
        if not self.routes:
            return wide // tensor, 0

        each = shape.get("moe_intermediate_size") or wide
        shared = shape.get("n_shared_experts") or 0
        # Ranks that split the tokens of a sequence send only their own.
        split = tensor if self.config.sequence_parallel else 1
        chosen = shape["num_experts_per_tok"] / split

        sent = chosen * self.config.expert_tensor_parallel
        columns = chosen * each + shared * each / tensor
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
        # Megatron computes no whole layer of experts again.
        named = [name for name in self.config.recompute_modules if name != "mlp" or not self.routes]
        return sum(parts.get(name, 0) for name in named)

    def _parts(self) -> dict[str, int]:
        """Return them by the module that can compute them again."""
        queries, keys = self.heads
        columns, sent = self.columns
        entry = self.entry
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
        if self.width != NORM:
            parts["input"] = 2 * entry * NORM // self.width
        parts["norms"] = 2 * entry * NORM // self.width
        parts["attention"] = each * (5 * queries + 4 * keys // self.groups)
        if self.asked.shape.get("model_type") in NORMS_HEADS:
            # The product, queries that follow each other, and the normed rows.
            parts["heads"] = self.tokens * NORM * (3 * queries + 3 * keys)
        parts["mlp"] = each * 5 * columns
        if self.routes:
            # The product of gate and up is kept before and after its weight. Experts
            # that train keep what enters them.
            parts["mlp"] += each * (columns + sent) if self._experts_train else 0
        return parts

    @property
    def _experts_train(self) -> bool:
        named = any(target.endswith("experts") for target in self.config.target_modules)
        return named or not self.config.lora_rank

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
