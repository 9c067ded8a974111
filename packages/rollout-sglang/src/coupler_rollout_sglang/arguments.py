"""Turn our configuration into SGLang's server arguments, in the engine's process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from coupler.engine_kit.inference.checkpoint import has_experts, linear_maps
from coupler.engine_kit.json_files import DamagedFile, read_json
from coupler.errors import ConfigError
from coupler_rollout_sglang import messages
from coupler_rollout_sglang.config import Precision, SGLangConfig

GIB = 1 << 30
CPU_CACHE_GIB = 0.25
SPARE = 16
"""Positions above the model's that SGLang is told of, since it keeps some to itself."""
DTYPES = {Precision.BF16: "bfloat16", Precision.FP16: "float16", Precision.FP32: "float32"}
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
ASK_S = 300.0
"""Seconds within which a process says what is free."""
FOREVER_S = 1e9
"""Seconds before SGLang ends itself, since it takes a long weight update for a hang."""


def server_arguments(
    config: SGLangConfig, model: str, seed: int, trust_remote_code: bool, *, gpu: bool
) -> dict[str, Any]:
    """Return the keyword arguments of ``ServerArgs``.

    They ask for random weights, token ids in and out, and our sampler.

    Raises:
        ConfigError: a key needs a GPU, or has no kernel there, or the model's folder
            has no configuration.
    """
    if config.deterministic_kernels and not gpu:
        raise ConfigError("rollout.deterministic_kernels=true needs a GPU.")
    if config.quantization and not gpu:
        raise ConfigError(
            f"rollout.quantization={config.quantization} needs a GPU.\n  try:  leaving it out, or "
            "rollout=vllm, whose fp8 runs on the CPU"
        )

    text = text_config(Path(model))
    if config.routed_experts:
        check_experts(text, model)
    dtype = DTYPES[precision(config, gpu=gpu)]
    positions = config.max_model_len or positions_of(text)

    arguments: dict[str, Any] = {
        "model_path": model,
        "trust_remote_code": trust_remote_code,
        "dtype": dtype,
        # Only an update brings weights.
        "load_format": "dummy",
        "custom_weight_loader": [messages.LOADER],
        "sampling_backend": messages.SAMPLER,
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        # No sampling defaults come from the model's folder.
        "sampling_defaults": "openai",
        "random_seed": seed % 2**31,
        "context_length": positions + SPARE,
        "tp_size": config.tensor_parallel,
        "ep_size": config.expert_parallel,
        "max_running_requests": config.max_sequences,
        "disable_radix_cache": not config.prefix_caching,
        "disable_cuda_graph": config.enforce_eager or not gpu,
        "enable_memory_saver": config.sleep_mode and gpu,
        "skip_server_warmup": True,
        # An idle scheduler would poll without a pause, and take a core from training.
        # Schedulers that share attention meet at every step, idle ones too.
        "sleep_on_idle": config.data_parallel == 1,
        "watchdog_timeout": FOREVER_S,
        "log_level": "error",
    }
    if config.quantization:
        arguments["quantization"] = config.quantization
    if not config.chunked_prefill:
        arguments["chunked_prefill_size"] = -1
    if config.data_parallel > 1:
        arguments |= {"dp_size": config.data_parallel, "enable_dp_attention": True}
    if config.attention_backend:
        arguments["attention_backend"] = config.attention_backend
    if config.routed_experts:
        arguments["enable_return_routed_experts"] = True
    if config.deterministic_kernels:
        arguments["enable_deterministic_inference"] = True

    if not gpu:
        arguments["device"] = "cpu"
        arguments.setdefault("attention_backend", "torch_native")
    return arguments | memory_arguments(config, text, dtype, gpu=gpu) | config.extra_args


def folder_arguments() -> dict[str, Any]:
    """Return the arguments that load the weights of the folder, as a judge wants it."""
    return {"load_format": "auto"}


def precision(config: SGLangConfig, *, gpu: bool) -> Precision:
    """Return the dtype of the weights that ``rollout.dtype`` asks for.

    Raises:
        ConfigError: SGLang has no kernels for it.
    """
    if config.dtype is Precision.FP32 and gpu:
        raise ConfigError(
            "rollout.dtype=fp32: SGLang's kernels for GPUs compute in 16 bits.\n  set:  "
            "rollout.dtype=bf16, or fp16, which rounds less"
        )

    if config.dtype is Precision.AUTO:
        return Precision.BF16 if gpu else Precision.FP32
    return config.dtype


def check_experts(text: dict[str, Any], model: str) -> None:
    """Check that SGLang finds how many experts a token goes to.

    Raises:
        ConfigError: the model's configuration does not say it.
    """
    if not text.get(messages.TOPK):
        raise ConfigError(
            "rollout.routed_experts=true needs a mixture of experts, and config.json of "
            f"model.path={model} has no {messages.TOPK}.\n"
            "  set:  rollout.routed_experts=false"
        )


def adapter_arguments(
    rank: int,
    model: Path,
    place: Path,
    *,
    gpu: bool,
) -> dict[str, Any]:
    """Return the arguments that make room for one adapter of the layers' linear maps.

    SGLang starts with this adapter. The folder ``place`` gets its description, and
    updates bring its tensors.

    Raises:
        ConfigError: the layers are not known, or there are experts among them.
    """
    targets = linear_maps(model)
    if not targets or has_experts(model):
        lack = "is a mixture of experts" if targets else "has no checkpoint with names of layers"
        raise ConfigError(
            f"rollout.max_lora_rank={rank} is for the layers of a dense model, and "
            f"model.path={model} {lack}.\n"
            "  set:  rollout.max_lora_rank=0: every sync then brings the sum"
        )

    place.mkdir()
    # B holds the scale already, so that SGLang's is 1.
    described = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": targets,
    }
    (place / "adapter_config.json").write_text(json.dumps(described))

    found: dict[str, Any] = {
        "enable_lora": True,
        "max_lora_rank": rank,
        "lora_target_modules": targets,
        "lora_paths": [
            {
                "lora_name": messages.ADAPTER,
                "lora_path": str(place),
                "pinned": True,
            }
        ],
        # It counts what has no adapter as one more.
        "max_loras_per_batch": 2,
    }
    return found if gpu else found | {"lora_backend": "torch_native"}


def memory_arguments(
    config: SGLangConfig, text: dict[str, Any], dtype: str, *, gpu: bool
) -> dict[str, Any]:
    """Return how much device memory SGLang takes, and how much of it for its cache.

    SGLang's ``mem_fraction_static`` is no part of the device, but of what is free when
    it starts. With F bytes free before the weights and W bytes of weights, its cache
    has ``(F - W) - F * (1 - fraction) = F * fraction - W`` bytes. A budget of B bytes
    for weights and cache together is therefore ``fraction = B / F``. A cache of a given
    size is told as a number of tokens.

    Raises:
        ConfigError: it is more than is free.
    """
    found: dict[str, Any] = {}
    cache = config.kv_cache_gib or (0.0 if gpu else CPU_CACHE_GIB)
    if cache:
        each = bytes_per_token(text, dtype, config)
        found["max_total_tokens"] = max(int(cache * GIB) // each, 1)

    if gpu and config.gpu_memory_gib:
        free = free_bytes() / GIB
        if config.gpu_memory_gib >= free:
            raise ConfigError(
                f"rollout.gpu_memory_gib={config.gpu_memory_gib:g} is more than is free on the "
                f"device, {free:.1f}."
            )
        found["mem_fraction_static"] = config.gpu_memory_gib / free
    return found


def free_bytes() -> int:
    """Return the bytes that are free on the first visible GPU.

    A process of its own asks, since this one would keep half a GB there. What CUDA
    takes for that process is missed, as SGLang's own is when it looks.
    """
    code = "import torch; print(torch.cuda.mem_get_info(0)[0])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        timeout=ASK_S,
    )
    return int(done.stdout.split()[-1])


def bytes_per_token(text: dict[str, Any], dtype: str, config: SGLangConfig) -> int:
    """Return the bytes that the cache of one token has on one device.

    Keys and values of every layer are spread over the devices by heads. Latent
    attention has one vector for both, the same on every device.
    """
    layers = text["num_hidden_layers"]
    if "kv_lora_rank" in text:
        return layers * (text["kv_lora_rank"] + text["qk_rope_head_dim"]) * BYTES[dtype]

    heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    width = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    parts = config.tensor_parallel // config.data_parallel
    return 2 * layers * max(heads // parts, 1) * width * BYTES[dtype]


def text_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of the language model in a folder.

    Raises:
        ConfigError: the folder has none.
    """
    try:
        whole: dict[str, Any] = read_json(folder / "config.json")
    except DamagedFile as error:
        raise ConfigError(
            f"model.path={folder} has no readable config.json: {error}\n"
            "  set:  model.path to a folder of a model"
        ) from error
    return whole.get("text_config") or whole


def positions_of(text: dict[str, Any]) -> int:
    """Return the tokens of a sequence that a model takes at most."""
    return int(text["max_position_embeddings"])
