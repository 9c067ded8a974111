"""What users can set for ``engine=fsdp`` and ``rollout=hf``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from coupler import EngineConfig, RolloutConfig


class Precision(StrEnum):
    AUTO = "auto"  # bf16 on a GPU, fp32 on the CPU
    BF16 = "bf16"
    FP32 = "fp32"


@dataclass
class HFConfig(RolloutConfig):
    """``rollout=hf``."""

    name: str = "hf"
    dtype: Precision = Precision.AUTO
    max_sequences: int = 256  # decoded together; further requests wait
    max_prefill_tokens: int = 8192  # of one forward over new prompts, padding included
    kv_cache_gib: float = 4.0  # sequences are admitted while all could grow to the longest one's limit within it

    def __post_init__(self) -> None:
        for key in ("max_sequences", "max_prefill_tokens", "kv_cache_gib"):
            if getattr(self, key) <= 0:
                raise ValueError(f"rollout.{key} must be above 0, got {getattr(self, key)}.")


class Schedule(StrEnum):
    """Shapes of the learning rate over the run: see :mod:`coupler.schedules`."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    WSD = "wsd"


@dataclass
class FSDPConfig(EngineConfig):
    """PyTorch FSDP2 with AdamW. Master weights, optimizer state and gradient reduction are fp32."""

    name: str = "fsdp"
    dtype: Precision = Precision.AUTO  # of activations and the weights they meet; auto: bf16 on a GPU, else fp32
    sync_dtype: Precision = Precision.AUTO  # of the weights that a rollout gets; auto: as dtype
    max_tokens_per_gpu: int = 16384  # of one micro-batch; performance only, no result depends on it
    fsdp_size: int = 0  # ranks that share one copy of the model; 0 is all; fewer is hybrid sharding (HSDP)
    reshard_after_forward: bool = True  # gather weights again for the backward pass: less memory, more traffic
    sync_every_micro_batch: bool = True  # False reduces gradients once a step and holds them whole meanwhile
    gradient_checkpointing: bool = True  # recompute activations of each layer in the backward pass
    compile: bool = False  # torch.compile of each layer: a third less time a step on a GPU, a minute at the start
    lora_rank: int = 0  # of the updates of the layers' linear maps (LoRA); 0 trains the weights themselves
    lora_alpha: float = 16.0  # the updates are scaled by lora_alpha / lora_rank
    logits_tile: int = 0  # elements of the fp32 logits that exist at a time; 0 chooses by device and rows
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

    def __post_init__(self) -> None:
        for key in ("max_tokens_per_gpu", "lr", "eps"):
            _require(getattr(self, key) > 0, key, "must be above 0", getattr(self, key))
        for key in (
            "fsdp_size", "logits_tile", "weight_decay", "max_grad_norm", "warmup_steps", "total_steps", "decay_steps"
        ):  # fmt: skip
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
