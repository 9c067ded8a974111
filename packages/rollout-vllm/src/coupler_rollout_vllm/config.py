"""Declare the options of ``rollout=vllm``. Every process may read them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

from coupler import RolloutConfig
from coupler.engine_kit.memory_plan import Asked, Needs
from coupler.interfaces import no_effect

# These engine arguments decide what tokens, log-probs and versions mean. Each maps to
# our own key for it, or to an empty text if there is none.
OURS = {
    "model": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "rollout.dtype",
    "quantization": "rollout.quantization",
    "quantization_config": "rollout.quantization",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "max_num_seqs": "rollout.max_sequences",
    "max_num_batched_tokens": "rollout.max_batched_tokens",
    "max_model_len": "rollout.max_model_len",
    "gpu_memory_utilization": "rollout.gpu_memory_gib",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "enable_prefix_caching": "rollout.prefix_caching",
    "enable_chunked_prefill": "rollout.chunked_prefill",
    "enforce_eager": "rollout.enforce_eager",
    "enable_sleep_mode": "rollout.sleep_mode",
    "seed": "seed",
    "load_format": "",
    "logprobs_mode": "",
    "worker_extension_cls": "",
    "generation_config": "",
    "skip_tokenizer_init": "",
    "scheduler_cls": "",
    "enable_return_routed_experts": "rollout.routed_experts",
    "enable_lora": "rollout.max_lora_rank",
    "max_lora_rank": "rollout.max_lora_rank",
    "max_loras": "",
    "lora_dtype": "rollout.dtype",
    "lora_target_modules": "",
    "data_parallel_size": "rollout.replicas",
    "pipeline_parallel_size": "rollout.tensor_parallel",
    "distributed_executor_backend": "rollout.tensor_parallel",
    "weight_transfer_config": "",
    "speculative_config": "",
    "logits_processors": "",
    "max_logprobs": "",
    "override_generation_config": "",
}
# vLLM silently raises temperatures below the lowest, and refuses those above the
# highest.
LOWEST, HIGHEST = 0.01, 2.0
FP32_ADAPTER = (
    "rollout.max_lora_rank needs 16 bits on a GPU: vLLM's kernels take no adapter of fp32.\n"
    "  try:  rollout.dtype=bf16, or rollout.max_lora_rank=0: every sync then brings the sum"
)
QUANTIZATIONS = ("fp8",)
CPU_CACHE_GIB = 0.25
HIGHEST_RANK = 512
"""Highest rank of an adapter that vLLM runs."""


class Precision(StrEnum):
    AUTO = "auto"
    """bf16 on a GPU, fp32 on the CPU."""
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


@dataclass
class VLLMConfig(RolloutConfig):
    """Options of ``rollout=vllm``. Memory is of one device, in GiB."""

    name: str = "vllm"
    dtype: Precision = Precision.AUTO
    """Dtype of weights and computation. `auto` is bf16 on a GPU and fp32 on the CPU."""
    quantization: str = ""
    """Precision that weights are rounded to while they are loaded, `fp8`. Empty keeps
    that of `rollout.dtype`. Training and the transport keep theirs in any case.
    """
    tensor_parallel: int = no_effect(1)
    """Devices that one replica is split over, all of one node."""
    max_sequences: int = no_effect(256)
    """Most sequences that are decoded together. Further requests wait."""
    max_batched_tokens: int = no_effect(0)
    """Most tokens of one step, with those of prompts in chunks. 0 lets vLLM choose."""
    max_model_len: int = 0
    """Most tokens of a prompt with its completion. 0 takes as many as the run's longest
    sequence, for which the cache must have room.
    """
    gpu_memory_gib: float = no_effect(0.0)
    """GiB on each device for weights, activations and cache. 0 takes nine tenths of it.
    """
    kv_cache_gib: float = no_effect(0.0)
    """GiB on each device for the KV cache. 0 takes what `rollout.gpu_memory_gib`
    leaves, and a quarter of a GiB on the CPU.
    """
    prefix_caching: bool = no_effect(True)
    """Compute a prompt once for all samples that share it."""
    chunked_prefill: bool = True
    """Compute long prompts in pieces, between the tokens of other requests. The CPU
    does so only with `rollout.per_request_seeds=false`.
    """
    enforce_eager: bool = no_effect(False)
    """Leave out CUDA graphs and compilation. The start is quicker, and tokens are
    slower.
    """
    per_request_seeds: bool = True
    """Give equal tokens to equal requests. `false` is faster on a GPU."""
    sleep_mode: bool = no_effect(True)
    """Let device memory be given back while others need it, as `offload=true` does. It
    costs nothing while the rollout is awake."""
    max_lora_rank: int = 0
    """Highest rank of an adapter that vLLM runs itself, so that a sync brings the
    adapter alone. With 0 a sync brings the sum of weights and adapter.
    """
    routed_experts: bool = False
    """Return which experts each token went to, for router replay. It needs a GPU."""
    extra_args: dict[str, Any] = field(default_factory=dict)
    """Further engine arguments, under vLLM's own names."""

    @property
    def devices_per_replica(self) -> int:
        return self.tensor_parallel

    @property
    def sequence_limit(self) -> tuple[str, int]:
        return "max_model_len", self.max_model_len

    def for_run(self, longest: int) -> Self:
        if self.max_model_len:
            return self
        return replace(self, max_model_len=longest)

    @property
    def adapter_limit(self) -> tuple[str, int]:
        return "max_lora_rank", self.max_lora_rank

    def memory_needs(self, asked: Asked) -> Needs:
        from coupler_rollout_vllm import memory_plan

        return memory_plan.needs(self, asked)

    def __post_init__(self) -> None:
        for key, least in (
            ("tensor_parallel", 1),
            ("max_sequences", 1),
            ("max_batched_tokens", 0),
            ("max_model_len", 0),
            ("gpu_memory_gib", 0),
            ("kv_cache_gib", 0),
            ("max_lora_rank", 0),
        ):
            value = getattr(self, key)
            if value < least:
                raise ValueError(f"rollout.{key} must be at least {least}, got {value}.")

        if self.max_lora_rank > HIGHEST_RANK:
            raise ValueError(
                f"rollout.max_lora_rank must be at most {HIGHEST_RANK}, got {self.max_lora_rank}."
            )

        if self.quantization:
            self._check_quantization()
        if taken := sorted(OURS.keys() & self.extra_args.keys()):
            key = OURS[taken[0]]
            if key:
                hint = f"set {key}"
            else:
                hint = "leave it out, since log-probs and weight updates depend on it"
            raise ValueError(f"rollout.extra_args.{taken[0]} is not yours to set: {hint}.")

    def _check_quantization(self) -> None:
        given = f"rollout.quantization={self.quantization}"

        if self.quantization not in QUANTIZATIONS:
            raise ValueError(
                f"{given} is none of {', '.join(QUANTIZATIONS)}: set one of them, or leave it out."
            )
        if self.dtype is Precision.FP32:
            raise ValueError(f"{given} starts from 16 bits: set rollout.dtype=bf16.")
        if self.max_lora_rank:
            raise ValueError(
                f"{given} takes no adapter apart from the weights: set rollout.max_lora_rank=0, "
                "so that every sync brings the sum."
            )


def bad_temperature(key: str, value: float) -> str:
    """Return why vLLM cannot sample at this temperature, or an empty text if it can."""
    if value == 0 or LOWEST <= value <= HIGHEST:
        return ""
    return f"{key} must be 0, or between {LOWEST} and {HIGHEST:g}, for rollout=vllm; it is {value}."
