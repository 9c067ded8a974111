"""What users can set for ``engine=megatron``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from coupler.adamw import AdamWConfig


class Precision(StrEnum):
    AUTO = "auto"  # bf16 on a GPU, fp32 on the CPU
    BF16 = "bf16"
    FP32 = "fp32"


class Recompute(StrEnum):
    """Which activations the backward pass computes again."""

    NONE = "none"
    SELECTIVE = "selective"  # of attention
    FULL = "full"  # of each layer


@dataclass
class MegatronConfig(AdamWConfig):
    """Megatron-Core with its distributed AdamW. Master weights, optimizer state and gradient reduction are fp32."""

    name: str = "megatron"
    tensor_parallel: int = 1  # ranks that split each matrix
    pipeline_parallel: int = 1  # ranks that split the layers
    virtual_pipeline: int = 1  # parts of the layers on each of these, taken in turns: smaller bubbles
    context_parallel: int = 1  # ranks that split each sequence
    expert_parallel: int = 1  # ranks that split the experts of each layer
    expert_tensor_parallel: int = 1  # ranks that split each matrix of an expert
    sequence_parallel: bool = True  # split what lies between the split matrices over the tokens: less memory
    dtype: Precision = Precision.AUTO  # of activations and of the weights they meet
    sync_dtype: Precision = Precision.AUTO  # of the weights that a rollout gets; auto: as dtype
    max_tokens_per_gpu: int = 16384  # of one micro-batch; performance only, no result depends on it
    gradient_checkpointing: Recompute = Recompute.FULL
    logits_tile: int = 0  # elements of the fp32 logits that exist at a time; 0 chooses

    @property
    def ranks_per_shard(self) -> int:
        """Ranks that work on the same data shard."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def ranks_per_sequence(self) -> int:
        """Ranks that hold a part of each sequence."""
        return self.context_parallel

    def __post_init__(self) -> None:
        self._require(self.max_tokens_per_gpu > 0, "max_tokens_per_gpu", "must be above 0")
        for key in (
            "tensor_parallel", "pipeline_parallel", "virtual_pipeline", "context_parallel", "expert_parallel",
            "expert_tensor_parallel",
        ):  # fmt: skip
            self._require(getattr(self, key) >= 1, key, "must be at least 1")
        self._require(self.logits_tile >= 0, "logits_tile", "must not be negative")
        super().__post_init__()
