"""Keys of rollout=vllm, and the engine arguments that they become."""

from __future__ import annotations

import pytest

from coupler.errors import ConfigError
from coupler.interfaces import Model, Rank
from coupler.plugins.manager import Plugins
from coupler_rollout_vllm.arguments import GIB, engine_arguments
from coupler_rollout_vllm.config import Precision, VLLMConfig

MODEL = Model("/m")


def arguments(**settings: object) -> dict[str, object]:
    return engine_arguments(VLLMConfig(**settings), MODEL, Rank(seed=2**40 + 3))  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["tensor_parallel", "max_sequences", "max_batched_tokens", "kv_cache_gib"])
def test_values_out_of_range_name_the_key(key: str) -> None:
    with pytest.raises(ValueError, match=f"rollout.{key} must be at least"):
        VLLMConfig(**{key: -1})  # type: ignore[arg-type]


def test_every_key_reaches_the_engine() -> None:
    found = arguments(
        dtype=Precision.FP16, tensor_parallel=2, max_sequences=7, max_batched_tokens=99, max_model_len=50,
        kv_cache_gib=0.5, prefix_caching=False, chunked_prefill=False, enforce_eager=True,
        extra_args={"block_size": 32},
    )  # fmt: skip
    expected = {
        "dtype": "float16", "tensor_parallel_size": 2, "max_num_seqs": 7, "max_num_batched_tokens": 99,
        "max_model_len": 50, "kv_cache_memory_bytes": GIB // 2, "enable_prefix_caching": False,
        "enable_chunked_prefill": False, "enforce_eager": True, "block_size": 32, "seed": 3,
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected


def test_what_gives_tokens_and_logprobs_their_meaning_is_fixed() -> None:
    found = arguments()
    fixed = {"load_format": "dummy", "logprobs_mode": "processed_logprobs", "generation_config": "vllm"}
    assert {key: found[key] for key in fixed} == fixed
    for key, hint in (("logprobs_mode", "leave it out"), ("dtype", "set rollout.dtype")):
        with pytest.raises(ConfigError, match=rf"(?s)rollout.extra_args.{key} is not yours to set.*{hint}"):
            arguments(extra_args={key: "x"})


def test_capabilities_follow_the_configuration() -> None:
    backend = Plugins.load().get("rollout", "vllm")
    assert "memory:sleep" in backend.capabilities_of(VLLMConfig())
    assert "memory:sleep" not in backend.capabilities_of(VLLMConfig(sleep_mode=False))
