"""What users can set for ``engine=megatron``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from coupler import EngineConfig


class Precision(StrEnum):
    AUTO = "auto"  # bf16 on a GPU, fp32 on the CPU
    BF16 = "bf16"
    FP32 = "fp32"


class Recompute(StrEnum):
    """Which activations the backward pass computes again."""

    NONE = "none"
    SELECTIVE = "selective"  # of attention
    FULL = "full"  # of each layer


class Schedule(StrEnum):
    """Shapes of the learning rate over the run: see :mod:`coupler.schedules`."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    WSD = "wsd"


@dataclass
class MegatronConfig(EngineConfig):
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
    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0  # never on biases and norms
    max_grad_norm: float = 1.0  # 0: no clipping
    schedule: Schedule = Schedule.CONSTANT
    warmup_steps: int = 0  # optimizer steps; the first one already has lr / warmup_steps
    total_steps: int = 0  # optimizer steps of the whole run; needed unless schedule is constant
    decay_steps: int = 0  # optimizer steps at the end of the run over which wsd decays
    min_lr_ratio: float = 0.0  # of lr, at the end of the schedule

    @property
    def ranks_per_shard(self) -> int:
        """Ranks that work on the same data shard."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def ranks_per_sequence(self) -> int:
        """Ranks that hold a part of each sequence."""
        return self.context_parallel

    def __post_init__(self) -> None:
        for key in ("max_tokens_per_gpu", "lr", "eps"):
            _require(getattr(self, key) > 0, key, "must be above 0", getattr(self, key))
        for key in (
            "tensor_parallel", "pipeline_parallel", "virtual_pipeline", "context_parallel", "expert_parallel",
            "expert_tensor_parallel",
        ):  # fmt: skip
            _require(getattr(self, key) >= 1, key, "must be at least 1", getattr(self, key))
        for key in ("logits_tile", "weight_decay", "max_grad_norm", "warmup_steps", "total_steps", "decay_steps"):
            _require(getattr(self, key) >= 0, key, "must not be negative", getattr(self, key))
        for key in ("beta1", "beta2"):
            _require(0 <= getattr(self, key) < 1, key, "must be in [0, 1)", getattr(self, key))
        _require(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", "must be in [0, 1]", self.min_lr_ratio)
        if self.schedule != Schedule.CONSTANT:
            least = self.warmup_steps + max(self.decay_steps, 1)
            why = f"must be at least {least} (warm-up and decay) under engine.schedule={self.schedule}"
            _require(self.total_steps >= least, "total_steps", why, self.total_steps)
        if self.schedule == Schedule.WSD:
            _require(self.decay_steps > 0, "decay_steps", "must be above 0 under engine.schedule=wsd", self.decay_steps)


def _require(holds: bool, key: str, what: str, value: object) -> None:
    if not holds:
        raise ValueError(f"engine.{key} {what}, got {value}.")
