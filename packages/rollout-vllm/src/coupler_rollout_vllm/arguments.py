"""Turn our configuration into vLLM's engine arguments, in the rollout's process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coupler.engine_kit.inference.checkpoint import has_experts, linear_maps
from coupler.errors import ConfigError
from coupler.interfaces import Model, Rank
from coupler_rollout_vllm.compat import engine as vllm
from coupler_rollout_vllm.config import CPU_CACHE_GIB, FP32_ADAPTER, Precision, VLLMConfig

GIB = 1 << 30
DTYPES = {Precision.BF16: "bfloat16", Precision.FP16: "float16", Precision.FP32: "float32"}
WORKER = "coupler_rollout_vllm.worker.gate.WorkerExtension"
SCHEDULER = "coupler_rollout_vllm.scheduler.scheduler"


def engine_arguments(config: VLLMConfig, model: Model, rank: Rank) -> dict[str, Any]:
    """Return the keyword arguments of ``AsyncEngineArgs``.

    They ask for dummy weights or the folder's, token ids in and out, and log-probs
    after the temperature.

    Raises:
        ConfigError: a key needs a GPU.
    """
    # vLLM brings torch. Without either, a rollout can still say what is missing.
    import torch

    gpu = torch.cuda.is_available()
    if config.routed_experts and not gpu:
        raise ConfigError(
            "rollout.routed_experts=true needs a GPU: vLLM's CPU build records no routes."
        )

    dtype = config.dtype
    if dtype is Precision.AUTO:
        dtype = Precision.BF16 if gpu or config.quantization else Precision.FP32

    arguments: dict[str, Any] = {
        "model": model.path,
        "trust_remote_code": model.trust_remote_code,
        "dtype": DTYPES[dtype],
        # Only an update brings weights, but to a model that serves those of its folder.
        "load_format": "auto" if model.own_weights else "dummy",
        "skip_tokenizer_init": True,
        # No sampling defaults and no stop tokens come from the model's folder.
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1,
        "seed": rank.seed % 2**32,
        "tensor_parallel_size": config.tensor_parallel,
        "distributed_executor_backend": "uni" if config.tensor_parallel == 1 else "mp",
        "max_num_seqs": config.max_sequences,
        "enable_prefix_caching": config.prefix_caching,
        # On the CPU, vLLM cannot take back the random number that it draws at the end
        # of a piece of a prompt.
        "enable_chunked_prefill": config.chunked_prefill and (gpu or not config.per_request_seeds),
        "enforce_eager": config.enforce_eager or not gpu,
        "enable_sleep_mode": config.sleep_mode and gpu,
        "worker_extension_cls": WORKER,
        "scheduler_cls": SCHEDULER,
        "disable_log_stats": True,
    }

    if config.quantization:
        arguments["quantization"] = vllm.quantization(config.quantization)
    if config.max_batched_tokens:
        arguments["max_num_batched_tokens"] = config.max_batched_tokens
    if config.max_model_len:
        arguments["max_model_len"] = config.max_model_len
    if config.routed_experts:
        arguments["enable_return_routed_experts"] = True
    if config.max_lora_rank:
        arguments |= adapter_arguments(config.max_lora_rank, Path(model.path), dtype, gpu)
    return arguments | memory_arguments(config, gpu) | config.extra_args


def adapter_arguments(rank: int, folder: Path, dtype: Precision, gpu: bool) -> dict[str, Any]:
    """Return the arguments that make room for one adapter of the layers' linear maps.

    Raises:
        ConfigError: vLLM's kernels do not take adapters of this dtype, or of this model
            on the CPU.
    """
    if gpu and dtype is Precision.FP32:
        raise ConfigError(FP32_ADAPTER)
    if not gpu and has_experts(folder):
        raise ConfigError(
            "rollout.max_lora_rank with a mixture of experts needs a GPU: vLLM then takes "
            "experts that no CPU runs.\n"
            "  try:  rollout.max_lora_rank=0: every sync then brings the sum"
        )

    return {
        "enable_lora": True,
        "max_lora_rank": vllm.adapter_size(rank),
        "max_loras": 1,
        "lora_target_modules": linear_maps(folder) or None,
    }


def memory_arguments(config: VLLMConfig, gpu: bool) -> dict[str, Any]:
    """Return how much device memory vLLM takes, and how much of it for its cache.

    Raises:
        ConfigError: it is more than the device has.
    """
    if not gpu:
        return {"kv_cache_memory_bytes": int((config.kv_cache_gib or CPU_CACHE_GIB) * GIB)}

    found: dict[str, Any] = {}
    if config.kv_cache_gib:
        found["kv_cache_memory_bytes"] = int(config.kv_cache_gib * GIB)
    # vLLM wants this much to be free before it starts.
    if wanted := config.gpu_memory_gib or config.kv_cache_gib:
        total = vllm.device_bytes() / GIB
        if wanted > total:
            key = "gpu_memory_gib" if config.gpu_memory_gib else "kv_cache_gib"
            raise ConfigError(f"rollout.{key}={wanted:g} is more than the device has, {total:.1f}.")
        found["gpu_memory_utilization"] = wanted / total
    return found
