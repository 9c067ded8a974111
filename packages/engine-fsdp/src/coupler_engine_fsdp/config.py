"""Declare the options of ``engine=fsdp`` and ``rollout=hf``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from coupler import RolloutConfig
from coupler.engine_kit.lora import LoRAConfig
from coupler.engine_kit.memory_plan import Asked, Needs, Recomputed
from coupler.engine_kit.precision import Precision, Products
from coupler.interfaces import NO_EFFECT, no_effect


@dataclass
class HFConfig(RolloutConfig):
    """Options of ``rollout=hf``: sampling with transformers, in the engine's own
    package.
    """

    name: str = "hf"
    dtype: Precision = Precision.AUTO
    """The dtype of weights and computation. auto is bf16 on a GPU, fp32 on the CPU."""
    max_sequences: int = no_effect(256)
    """At most this many sequences are decoded together. Further requests wait."""
    max_prefill_tokens: int = no_effect(8192)
    """At most this many tokens, with padding, are in one forward pass over prompts."""
    kv_cache_gib: float = no_effect(4.0)
    """Sequences are admitted while the cache of all of them would fit into this many
    GiB at the length that the longest one may reach.
    """

    def __post_init__(self) -> None:
        for key in ("max_sequences", "max_prefill_tokens", "kv_cache_gib"):
            if getattr(self, key) <= 0:
                raise ValueError(f"rollout.{key} must be above 0, got {getattr(self, key)}.")

    def memory_needs(self, asked: Asked) -> Needs:
        from coupler_engine_fsdp.memory import rollout

        return rollout.needs(self, asked)


class OptimizerName(StrEnum):
    """The optimizer of the layers' matrices. Everything else is AdamW's."""

    ADAMW = "adamw"
    ADAMW8BIT = "adamw8bit"
    MUON = "muon"


class Recipe(StrEnum):
    """The scales of operands in fp8, by torchao's names."""

    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"
    ROWWISE = "rowwise"
    TENSORWISE = "tensorwise"


CHECKPOINTING = "true, false or auto (a number of layers is recompute_num_layers)"


class Recompute(StrEnum):
    """Says whether layers compute their activations again in the backward pass."""

    TRUE = "true"
    FALSE = "false"
    AUTO = "auto"

    @classmethod
    def _missing_(cls, value: object) -> Recompute | None:
        """Take Python's own True and False, too."""
        return cls(str(value).lower()) if isinstance(value, bool) else None


@dataclass
class FSDPConfig(LoRAConfig):
    """PyTorch FSDP2 with AdamW, or with Muon for the layers' matrices.

    Master weights, optimizer state and gradient reduction are fp32.
    """

    one_rank: ClassVar[Mapping[str, Any]] = {
        **LoRAConfig.one_rank,
        "sequence_parallel": 1,
        "fsdp_size": 0,
    }

    name: str = "fsdp"
    dtype: Precision = Precision.AUTO
    """The dtype of activations and of the weights they meet. auto is bf16 on a GPU and
    fp32 on the CPU.
    """
    precision: Products = Products.AUTO
    """The dtype of the operands of the layers' linear maps, in both passes. auto is
    engine.dtype. fp8 needs torchao and a GPU of compute capability 8.9 or later, and
    the CPU emulates it. Embeddings, head, routers and experts keep engine.dtype.
    """
    fp8_recipe: Recipe = Recipe.ROWWISE_WITH_GW_HP
    """The scales of engine.precision=fp8, by torchao's names. rowwise_with_gw_hp has
    one for each token, so that no log-prob depends on the others of its micro-batch,
    and multiplies gradients of weights in engine.dtype. rowwise multiplies those in fp8
    too. tensorwise has one scale for each tensor, which takes the least time.
    """
    sync_dtype: Precision = Precision.AUTO
    """The dtype of the weights that a rollout gets. auto is engine.dtype."""
    max_tokens_per_gpu: int = no_effect(16384)
    """One micro-batch has at most this many tokens on each rank. It changes speed and
    memory, and no result.
    """
    sequence_parallel: int = no_effect(1)
    """This many ranks split each sequence, so that one as many times as long fits. It
    divides the attention heads of the model and the ranks.
    """
    fsdp_size: int = no_effect(0)
    """This many ranks share one copy of the model. 0 is all of them, and fewer is
    hybrid sharding (HSDP).
    """
    reshard_after_forward: bool = no_effect(True)
    """Gather weights again for the backward pass. It takes less memory and more
    traffic. false gathers them once for all micro-batches of an optimizer step.
    """
    sync_every_micro_batch: bool = no_effect(True)
    """Reduce gradients after each micro-batch. false reduces them once a step and holds
    them whole meanwhile.
    """
    gradient_checkpointing: Recompute = field(
        default=Recompute.TRUE, metadata={**NO_EFFECT, "takes": CHECKPOINTING}
    )
    """Recompute the activations of each layer in the backward pass: true or false. auto
    takes the fewest layers with which training fits on its GPU by the estimate of
    coupler plan --memory, and all layers where there is none.
    """
    recompute_num_layers: int = no_effect(0)
    """Recompute the first so many layers alone, under
    engine.gradient_checkpointing=true. 0 is all of them.
    """
    compile: bool = False
    """Compile each layer with torch.compile. On a GPU a step takes a third less time,
    and the start a minute more.
    """
    optimizer: OptimizerName = OptimizerName.ADAMW
    """Train with AdamW, or the matrices of the layers with Muon, and embeddings, head,
    norms and experts with AdamW. adamw8bit is AdamW whose moments take 2 bytes of each
    trained weight instead of 8, and needs torchao.
    """
    offload_optimizer: bool = no_effect(False)
    """Hold AdamW's moments in host memory, and in bf16 the fp32 master weights too. A
    step brings them to the device piece by piece, so that 12 bytes of each trained
    weight are free while gradients are computed. It needs one rank. Masters of an
    adapter stay.
    """
    muon_momentum: float = 0.95
    """Muon's decay of the running mean of gradients."""
    logits_tile: int = no_effect(0)
    """At most this many elements of the fp32 logits exist at a time. 0 chooses by
    device and rows.
    """

    @property
    def micro_batch_limit(self) -> tuple[str, int]:
        return "max_tokens_per_gpu", self.max_tokens_per_gpu

    @property
    def ranks_per_shard(self) -> int:
        return self.sequence_parallel

    @property
    def ranks_per_sequence(self) -> int:
        return self.sequence_parallel

    @property
    def split(self) -> str:
        return f"sequence {self.sequence_parallel}" if self.sequence_parallel > 1 else ""

    @property
    def recomputed(self) -> int | None:
        """Return how many of the first layers recompute. None is all of them."""
        if self.gradient_checkpointing == Recompute.FALSE:
            return 0
        return self.recompute_num_layers or None

    @property
    def leaves_recompute(self) -> bool:
        return self.gradient_checkpointing == Recompute.AUTO

    @property
    def rounds_to(self) -> str:
        return "float8_e4m3fn" if self.precision == Products.FP8 else ""

    def memory_needs(self, asked: Asked) -> Needs:
        from coupler_engine_fsdp.memory import engine

        return engine.needs(self, asked)

    def choose_recompute(self, asked: Asked, fits: Callable[[Needs], bool] | None) -> Recomputed:
        from coupler_engine_fsdp.memory import recompute

        return recompute.choose(self, asked, fits)

    def __post_init__(self) -> None:
        self._require(self.max_tokens_per_gpu > 0, "max_tokens_per_gpu", "must be above 0")
        self._require(self.sequence_parallel >= 1, "sequence_parallel", "must be at least 1")
        for key in ("fsdp_size", "logits_tile", "recompute_num_layers"):
            self._require(getattr(self, key) >= 0, key, "must not be negative")

        self.gradient_checkpointing = Recompute(self.gradient_checkpointing)
        self._require(
            self.gradient_checkpointing == Recompute.TRUE or not self.recompute_num_layers,
            "recompute_num_layers",
            "needs engine.gradient_checkpointing=true",
        )

        muon = self.optimizer == OptimizerName.MUON
        self._require(not (muon and self.lora_rank), "optimizer", "needs engine.lora_rank=0")
        eight = self.precision == Products.FP8
        self._require(not (eight and self.lora_rank), "precision", "needs engine.lora_rank=0")
        self._require(
            eight or self.fp8_recipe == FSDPConfig.fp8_recipe,
            "fp8_recipe",
            "needs engine.precision=fp8",
        )

        one = self.ranks == 1 and not muon
        self._require(
            one or not self.offload_optimizer,
            "offload_optimizer",
            "needs engine.ranks=1 and engine.optimizer=adamw or adamw8bit",
        )
        self._require(0 <= self.muon_momentum < 1, "muon_momentum", "must be in [0, 1)")
        self._require(
            muon or self.muon_momentum == FSDPConfig.muon_momentum,
            "muon_momentum",
            "needs engine.optimizer=muon",
        )
        super().__post_init__()
