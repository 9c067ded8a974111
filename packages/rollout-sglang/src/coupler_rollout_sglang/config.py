"""Declare the options of ``rollout=sglang``. Every process may read them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self
from urllib.parse import urlsplit

from coupler import RolloutConfig
from coupler.engine_kit.memory_plan import Asked, Needs
from coupler.interfaces import NO_EFFECT, no_effect

# These server arguments decide what tokens, log-probs, versions and memory mean. Each
# maps to our own key for it, or to an empty text if there is none.
OURS = {
    "model_path": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "rollout.dtype",
    "quantization": "rollout.quantization",
    "tp_size": "rollout.tensor_parallel",
    "dp_size": "rollout.data_parallel",
    "ep_size": "rollout.expert_parallel",
    "enable_dp_attention": "rollout.data_parallel",
    "pp_size": "rollout.tensor_parallel",
    "max_running_requests": "rollout.max_sequences",
    "context_length": "rollout.max_model_len",
    "mem_fraction_static": "rollout.gpu_memory_gib",
    "max_total_tokens": "rollout.kv_cache_gib",
    "disable_radix_cache": "rollout.prefix_caching",
    "chunked_prefill_size": "rollout.chunked_prefill",
    "disable_cuda_graph": "rollout.enforce_eager",
    "enable_memory_saver": "rollout.sleep_mode",
    "attention_backend": "rollout.attention_backend",
    "random_seed": "seed",
    "host": "rollout.server",
    "port": "rollout.server",
    "api_key": "",
    "admin_api_key": "",
    "device": "",
    "load_format": "",
    "custom_weight_loader": "",
    "sampling_backend": "",
    "skip_tokenizer_init": "",
    "tokenizer_path": "",
    "tokenizer_worker_num": "",
    "speculative_algorithm": "",
    "enable_custom_logit_processor": "",
    "enable_deterministic_inference": "rollout.deterministic_kernels",
    "rl_on_policy_target": "",
    "preferred_sampling_params": "",
    "enable_lora": "rollout.max_lora_rank",
    "max_lora_rank": "rollout.max_lora_rank",
    "lora_paths": "",
    "lora_target_modules": "",
    "max_loras_per_batch": "",
    "max_loaded_loras": "",
    "enable_return_routed_experts": "rollout.routed_experts",
    "nnodes": "rollout.tensor_parallel",
    "node_rank": "",
    "dist_init_addr": "",
    "disaggregation_mode": "",
    "weight_version": "",
    "custom_sigquit_handler": "",
}


QUANTIZATIONS = ("fp8",)
ROUTES_LOST = ("enable_hierarchical_cache", "enable_lmcache", "enable_two_batch_overlap")
"""Server arguments with which SGLang returns routes of other tokens. The first two
bring caches back without their routes, and the last one writes two batches to one
place."""


class Precision(StrEnum):
    AUTO = "auto"
    """bf16 on a GPU, fp32 on the CPU."""
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class Mode(StrEnum):
    """How requests reach the engine."""

    ENGINE = "engine"
    """Over a socket that only this process and the engine have."""
    SERVER = "server"
    """Over HTTP, from SGLang's own server."""


@dataclass
class SGLangConfig(RolloutConfig):
    """Options of ``rollout=sglang``. Memory is of one device, in GiB."""

    name: str = "sglang"
    mode: Mode = field(default=Mode.ENGINE, metadata=NO_EFFECT)
    """How requests reach the engine. `engine` uses a private socket, and `server`
    speaks HTTP to SGLang's server."""
    server: str = no_effect("")
    """Address of a server that runs already, as `http://host:port`. Empty starts one on
    this machine. It belongs to `rollout.mode=server`."""
    attention_backend: str = ""
    """Kernels of attention, as `fa3`, `fa4`, `flashinfer` or `triton`. Empty takes
    those that SGLang chooses for the device.
    """
    dtype: Precision = Precision.AUTO
    """Dtype of weights and computation. `auto` is bf16 on a GPU and fp32 on the CPU.
    SGLang has no kernels for fp32 on a GPU.
    """
    quantization: str = ""
    """Precision that weights are rounded to while they are loaded, `fp8`. Empty keeps
    that of `rollout.dtype`. Training and the transport keep theirs. It needs a GPU.
    """
    tensor_parallel: int = no_effect(1)
    """Devices that share one copy of the model, all of one node."""
    data_parallel: int = no_effect(1)
    """Parts of `rollout.tensor_parallel` that each compute the attention of their own
    requests. It is meant for models whose cache is the same on every device.
    """
    expert_parallel: int = no_effect(1)
    """Parts into which the experts are spread, within `rollout.tensor_parallel`."""
    max_sequences: int = no_effect(256)
    """Most sequences that are decoded together."""
    max_model_len: int = no_effect(0)
    """Most tokens of a prompt with its completion. 0 takes as many as the run's longest
    sequence, for which the cache must have room.
    """
    gpu_memory_gib: float = no_effect(0.0)
    """GiB on each device for weights and KV cache. CUDA graphs and activations come on
    top. 0 leaves it to SGLang.
    """
    kv_cache_gib: float = no_effect(0.0)
    """GiB on each device for the KV cache. 0 takes what `rollout.gpu_memory_gib`
    leaves, and a quarter of a GiB on the CPU.
    """
    prefix_caching: bool = no_effect(True)
    """Compute a prompt once for all samples that share it."""
    chunked_prefill: bool = True
    """Compute long prompts in pieces, between the tokens of other requests."""
    enforce_eager: bool = no_effect(False)
    """Leave out CUDA graphs. The start is quicker, and tokens are slower."""
    per_request_seeds: bool = True
    """Give equal tokens to equal requests. `false` takes random numbers of the engine.
    """
    deterministic_kernels: bool = False
    """Use kernels whose results do not depend on the batch. Tokens are slower. It needs
    a GPU.
    """
    sleep_mode: bool = no_effect(True)
    """Let device memory be given back while others need it, as `offload=true` does. It
    costs nothing while the rollout is awake."""
    max_lora_rank: int = 0
    """Highest rank of an adapter that SGLang runs itself, so that a sync brings the
    adapter alone. With 0 a sync brings the sum of weights and adapter.
    """
    routed_experts: bool = False
    """Return which experts each token went to, for router replay."""
    extra_args: dict[str, Any] = field(default_factory=dict)
    """Further server arguments, under SGLang's own names."""

    @property
    def devices_per_replica(self) -> int:
        return 0 if self.server else self.tensor_parallel

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
        from coupler_rollout_sglang import memory_plan

        return memory_plan.needs(self, asked)

    def __post_init__(self) -> None:
        for key, least in (
            ("tensor_parallel", 1),
            ("data_parallel", 1),
            ("expert_parallel", 1),
            ("max_sequences", 1),
            ("max_model_len", 0),
            ("gpu_memory_gib", 0),
            ("kv_cache_gib", 0),
            ("max_lora_rank", 0),
        ):
            value = getattr(self, key)
            if value < least:
                raise ValueError(f"rollout.{key} must be at least {least}, got {value}.")

        for key in ("data_parallel", "expert_parallel"):
            if self.tensor_parallel % getattr(self, key):
                raise ValueError(
                    f"rollout.{key}={getattr(self, key)} must divide "
                    f"rollout.tensor_parallel={self.tensor_parallel}."
                )

        if self.max_lora_rank and self.data_parallel > 1:
            raise ValueError(
                f"rollout.max_lora_rank={self.max_lora_rank} needs rollout.data_parallel=1, it is "
                f"{self.data_parallel}: set one of them lower."
            )
        if self.quantization:
            self._check_quantization()
        if self.routed_experts:
            self._check_routes()
        if self.server:
            self._check_server()
        if taken := sorted(OURS.keys() & self.extra_args.keys()):
            raise ValueError(not_yours(taken[0]))

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

    def _check_routes(self) -> None:
        given = "rollout.routed_experts=true"

        if not self.chunked_prefill:
            raise ValueError(
                f"{given} needs rollout.chunked_prefill=true, since SGLang has room for the "
                "routes of one chunk."
            )
        if self.max_lora_rank:
            raise ValueError(
                f"{given} needs a mixture of experts, to which SGLang adds no adapter: set "
                f"rollout.max_lora_rank=0, it is {self.max_lora_rank}."
            )
        for name in ROUTES_LOST:
            if self.extra_args.get(name):
                raise ValueError(
                    f"{given} gets routes of other tokens with rollout.extra_args.{name}: leave "
                    "one of the two out."
                )

    def _check_server(self) -> None:
        if self.mode is not Mode.SERVER:
            raise ValueError(f"rollout.server={self.server} needs rollout.mode=server.")

        address = urlsplit(self.server)
        if address.scheme not in ("http", "https") or not address.hostname or address.path:
            raise ValueError(
                "rollout.server must be like http://host:port, without a path; it is "
                f"{self.server}."
            )
        if self.replicas > 1:
            raise ValueError(
                f"rollout.server is one replica: set rollout.replicas=1, it is {self.replicas}."
            )


def not_yours(name: str) -> str:
    """Say why an argument of SGLang is not the user's to set."""
    if key := OURS[name]:
        hint = f"set {key}"
    else:
        hint = "leave it out, since log-probs and weight updates depend on it"
    return f"rollout.extra_args.{name} is not yours to set: {hint}."
