"""Declare the options of ``engine=megatron``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import lcm
from typing import Any, ClassVar

from coupler.engine_kit.lora import LoRAConfig
from coupler.engine_kit.memory_plan import Asked, Needs, Recomputed
from coupler.engine_kit.precision import Precision
from coupler.interfaces import NO_EFFECT, no_effect


class Recompute(StrEnum):
    """The activations that the backward pass computes again."""

    NONE = "none"
    SELECTIVE = "selective"
    """Those of the parts of each layer that recompute_modules names."""
    FULL = "full"
    """Those of whole layers."""
    AUTO = "auto"
    """Those of the fewest whole layers with which training fits, by the plan."""


class RecomputeMethod(StrEnum):
    """The layers that are computed again under ``gradient_checkpointing=full``."""

    UNIFORM = "uniform"
    """All layers, in groups of recompute_num_layers whose first input is kept."""
    BLOCK = "block"
    """The first recompute_num_layers of each rank's part of the model."""


# Sizes above 1 that a test has together, in the words of MegatronConfig.split.
TESTED = frozenset(
    {
        "tensor",
        "tensor x pipeline",
        "tensor x pipeline x virtual pipeline",
        "tensor x context",
        "tensor x context x expert",
        "tensor x expert",
        "tensor x expert x expert tensor",
        "tensor x expert tensor",
        "pipeline",
        "pipeline x virtual pipeline",
        "pipeline x virtual pipeline x expert",
        "pipeline x context",
        "context",
        "context x expert",
        "expert",
    }
)
# Megatron's names, without the router's.
RECOMPUTABLE = ("core_attn", "layernorm", "mlp", "moe_act", "shared_experts")


@dataclass
class MegatronConfig(LoRAConfig):
    """Megatron-Core with its distributed AdamW.

    Master weights, optimizer state and gradient reduction are fp32.
    """

    one_rank: ClassVar[Mapping[str, Any]] = {
        **LoRAConfig.one_rank,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "virtual_pipeline": 1,
        "context_parallel": 1,
        "expert_parallel": 1,
        "expert_tensor_parallel": 1,
        "first_stage_layers": 0,
        "last_stage_layers": 0,
    }

    name: str = "megatron"
    tensor_parallel: int = no_effect(1)
    """This many ranks split each matrix."""
    pipeline_parallel: int = no_effect(1)
    """This many ranks split the layers."""
    virtual_pipeline: int = no_effect(1)
    """Each rank of a pipeline has this many separate parts of the layers and takes
    turns with them, for smaller bubbles.
    """
    first_stage_layers: int = no_effect(0)
    """The first stage of the pipeline has this many layers. 0 gives it as many as the
    stages between have.
    """
    last_stage_layers: int = no_effect(0)
    """The last stage of the pipeline, which computes the outputs too, has this many
    layers. 0 gives it as many as the stages between have.
    """
    context_parallel: int = no_effect(1)
    """This many ranks split each sequence."""
    expert_parallel: int = no_effect(1)
    """This many ranks split the experts of each layer."""
    expert_tensor_parallel: int = no_effect(1)
    """This many ranks split each matrix of an expert."""
    sequence_parallel: bool = no_effect(True)
    """Split the activations between the split matrices over the tokens, which saves
    memory.
    """
    dtype: Precision = Precision.AUTO
    """The dtype of activations and of the weights they meet. auto is bf16 on a GPU and
    fp32 on the CPU.
    """
    sync_dtype: Precision = Precision.AUTO
    """The dtype of the weights that a rollout gets. auto is engine.dtype."""
    sync_bucket_mib: int = no_effect(512)
    """A weight sync holds at most this many MiB of whole tensors at a time. Less saves
    memory, and more is faster.
    """
    max_tokens_per_gpu: int = no_effect(16384)
    """One micro-batch has at most this many tokens on each rank. It changes speed and
    memory, and no result.
    """
    gradient_checkpointing: Recompute = field(default=Recompute.FULL, metadata=NO_EFFECT)
    """Compute activations again in the backward pass: none, those of some parts of each
    layer, or all. auto takes the fewest whole layers with which training fits on its
    GPU by the estimate of coupler plan --memory, and all layers where there is none.
    """
    recompute_method: RecomputeMethod = field(default=RecomputeMethod.UNIFORM, metadata=NO_EFFECT)
    """Choose the layers that are computed again under
    engine.gradient_checkpointing=full.
    """
    recompute_num_layers: int = no_effect(1)
    """The layers of one group under engine.recompute_method=uniform, or all that are
    computed again under block."""
    recompute_modules: list[str] = field(default_factory=lambda: ["core_attn"], metadata=NO_EFFECT)
    """Name the parts of each layer that are computed again under
    engine.gradient_checkpointing=selective."""
    overlap_grad_reduce: bool = no_effect(False)
    """Sum gradients over ranks while the last backward pass goes on."""
    overlap_param_gather: bool = no_effect(False)
    """Bring the weights of a step together while the next forward pass goes on."""
    moe_aux_loss_coeff: float = 0.0
    """The weight of the loss that balances the experts of each sequence, summed over
    layers."""
    moe_z_loss_coeff: float = 0.0
    """The weight of the loss that keeps routers' logits small, summed over layers."""
    freeze_moe_router: bool = False
    """Do not train the routers, which decide where tokens go."""
    logits_tile: int = no_effect(0)
    """At most this many elements of the fp32 logits exist at a time. 0 chooses by
    device and rows.
    """

    @property
    def micro_batch_limit(self) -> tuple[str, int]:
        return "max_tokens_per_gpu", self.max_tokens_per_gpu

    @property
    def ranks_per_shard(self) -> int:
        """Count the ranks that work on the same data shard."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def ranks_per_group(self) -> int:
        """Count the ranks that have all experts of every layer together."""
        return lcm(
            self.ranks_per_shard,
            self.expert_tensor_parallel * self.expert_parallel * self.pipeline_parallel,
        )

    @property
    def ranks_per_sequence(self) -> int:
        """Count the ranks that hold a part of each sequence."""
        return self.context_parallel

    @property
    def split(self) -> str:
        """Name every size above 1, and the layers of a pipeline's ends if they are set.

        A note says if no test has these sizes together.
        """
        sizes = {
            "tensor": self.tensor_parallel,
            "pipeline": self.pipeline_parallel,
            "virtual pipeline": self.virtual_pipeline,
            "context": self.context_parallel,
            "expert": self.expert_parallel,
            "expert tensor": self.expert_tensor_parallel,
        }
        ends = {"first": self.first_stage_layers, "last": self.last_stage_layers}

        set_ends = [f"{number} on the {end} stage" for end, number in ends.items() if number]
        layers = f", layers: {', '.join(set_ends)}" if set_ends else ""

        above = {name: size for name, size in sizes.items() if size > 1}
        tested = not above or " x ".join(above) in TESTED
        note = "" if tested else " (no test of coupler-engine-megatron has these together)"

        return " x ".join(f"{name} {size}" for name, size in above.items()) + layers + note

    @property
    def leaves_recompute(self) -> bool:
        return self.gradient_checkpointing == Recompute.AUTO

    @property
    def recomputes_layers(self) -> bool:
        """Tell whether whole layers are computed again. Without a plan auto is full."""
        return self.gradient_checkpointing in (Recompute.FULL, Recompute.AUTO)

    def memory_needs(self, asked: Asked) -> Needs:
        from coupler_engine_megatron import memory_plan

        return memory_plan.needs(self, asked)

    def choose_recompute(self, asked: Asked, fits: Callable[[Needs], bool] | None) -> Recomputed:
        from coupler_engine_megatron import recompute

        return recompute.choose(self, asked, fits)

    def __post_init__(self) -> None:
        for key in ("max_tokens_per_gpu", "sync_bucket_mib"):
            self._require(getattr(self, key) > 0, key, "must be above 0")
        for key in (
            "tensor_parallel",
            "pipeline_parallel",
            "virtual_pipeline",
            "context_parallel",
            "expert_parallel",
            "expert_tensor_parallel",
        ):
            self._require(getattr(self, key) >= 1, key, "must be at least 1")
        for key in (
            "first_stage_layers",
            "last_stage_layers",
            "logits_tile",
            "moe_aux_loss_coeff",
            "moe_z_loss_coeff",
        ):
            self._require(getattr(self, key) >= 0, key, "must not be negative")

        self._require(
            self.overlap_grad_reduce or not self.overlap_param_gather,
            "overlap_param_gather",
            "needs engine.overlap_grad_reduce=true",
        )

        self._check_recompute()
        super().__post_init__()

    def _check_recompute(self) -> None:
        self._require(self.recompute_num_layers >= 1, "recompute_num_layers", "must be at least 1")
        full = self.gradient_checkpointing == Recompute.FULL
        for key, default in (
            ("recompute_method", RecomputeMethod.UNIFORM),
            ("recompute_num_layers", 1),
        ):
            kept = getattr(self, key) == default
            self._require(full or kept, key, "needs engine.gradient_checkpointing=full")

        modules = list(self.recompute_modules)
        selective = self.gradient_checkpointing == Recompute.SELECTIVE
        known = bool(modules) and set(modules) <= set(RECOMPUTABLE)
        self._require(known, "recompute_modules", f"must name some of {', '.join(RECOMPUTABLE)}")
        self._require(
            selective or modules == ["core_attn"],
            "recompute_modules",
            "needs engine.gradient_checkpointing=selective",
        )
