"""What users can set for ``engine=fsdp`` and ``rollout=hf``."""

from __future__ import annotations

from dataclasses import dataclass

from coupler import RolloutConfig
from coupler.engine_kit.adamw import AdamWConfig
from coupler.engine_kit.precision import Precision


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


@dataclass
class FSDPConfig(AdamWConfig):
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

    @property
    def micro_batch_limit(self) -> tuple[str, int]:
        return "max_tokens_per_gpu", self.max_tokens_per_gpu

    @property
    def adapter_rank(self) -> tuple[str, int]:
        return "lora_rank", self.lora_rank

    def __post_init__(self) -> None:
        self._require(self.max_tokens_per_gpu > 0, "max_tokens_per_gpu", "must be above 0")
        for key in ("fsdp_size", "logits_tile", "lora_rank"):
            self._require(getattr(self, key) >= 0, key, "must not be negative")
        super().__post_init__()
