"""Keys of rollout=sglang, and the server arguments that they become."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from coupler.config.compose import compose
from coupler.errors import ConfigError, PluginError
from coupler.plugins.manager import Plugins
from coupler_rollout_sglang import arguments as module
from coupler_rollout_sglang import messages
from coupler_rollout_sglang.arguments import (
    GIB,
    adapter_arguments,
    bytes_per_token,
    folder_arguments,
    memory_arguments,
    server_arguments,
)
from coupler_rollout_sglang.compat import version
from coupler_rollout_sglang.config import OURS, Mode, Precision, SGLangConfig

SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "vocab_size": 320,
}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return str(tmp_path)


def arguments(folder: str, *, gpu: bool = True, **settings: object) -> dict[str, object]:
    config = SGLangConfig(**settings)  # type: ignore[arg-type]
    return server_arguments(config, folder, 2**40 + 3, False, gpu=gpu)


def test_a_judge_loads_the_weights_of_its_folder(folder: str) -> None:
    own = arguments(folder) | folder_arguments()
    assert (own["load_format"], arguments(folder)["load_format"]) == ("auto", "dummy")


@pytest.mark.parametrize(
    "key",
    [
        "tensor_parallel",
        "data_parallel",
        "expert_parallel",
        "max_sequences",
        "kv_cache_gib",
        "max_lora_rank",
    ],
)
def test_values_out_of_range_name_the_key(key: str) -> None:
    with pytest.raises(ValueError, match=f"rollout.{key} must be at least"):
        SGLangConfig(**{key: -1})  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["data_parallel", "expert_parallel"])
def test_parts_divide_the_devices(key: str) -> None:
    with pytest.raises(
        ValueError, match=rf"rollout\.{key}=3 must divide rollout\.tensor_parallel=4"
    ):
        SGLangConfig(tensor_parallel=4, **{key: 3})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"server": "http://h:1"}, "rollout.server=http://h:1 needs rollout.mode=server"),
        ({"server": "h:1", "mode": Mode.SERVER}, "rollout.server must be like http://host:port"),
        ({"server": "http://h/v1", "mode": Mode.SERVER}, "without a path; it is http://h/v1"),
        (
            {"server": "http://h:1", "mode": Mode.SERVER, "replicas": 2},
            "rollout.server is one replica",
        ),
    ],
)
def test_a_server_s_address_is_checked(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        SGLangConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"quantization": "int4"}, "rollout.quantization=int4 is none of fp8: set one of them"),
        (
            {"quantization": "fp8", "dtype": Precision.FP32},
            "rollout.quantization=fp8 starts from 16 bits: set rollout.dtype=bf16",
        ),
        (
            {"quantization": "fp8", "max_lora_rank": 8},
            "rollout.quantization=fp8 takes no adapter apart from the weights: set",
        ),
        (
            {"extra_args": {"quantization": "fp8"}},
            "rollout.extra_args.quantization is not yours to set: set rollout.quantization",
        ),
    ],
)
def test_a_quantisation_that_cannot_be_is_one_sentence(
    settings: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        SGLangConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"chunked_prefill": False},
            "rollout.routed_experts=true needs rollout.chunked_prefill=true",
        ),
        ({"max_lora_rank": 8}, "adds no adapter: set rollout.max_lora_rank=0, it is 8"),
        (
            {"extra_args": {"enable_hierarchical_cache": True}},
            "routes of other tokens with rollout.extra_args.enable_hierarchical_cache: leave one",
        ),
        (
            {"extra_args": {"enable_return_routed_experts": True}},
            "enable_return_routed_experts is not yours to set: set rollout.routed_experts",
        ),
    ],
)
def test_routes_that_cannot_be_are_one_sentence(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        SGLangConfig(routed_experts=True, **settings)  # type: ignore[arg-type]


def test_routes_are_asked_for_where_somebody_wants_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "num_experts_per_tok": 2}))
    assert arguments(str(tmp_path), routed_experts=True)["enable_return_routed_experts"] is True
    assert "enable_return_routed_experts" not in arguments(str(tmp_path))


def test_fp8_needs_a_gpu(folder: str) -> None:
    assert arguments(folder, quantization="fp8")["quantization"] == "fp8"
    assert "quantization" not in arguments(folder)
    with pytest.raises(ConfigError, match=r"rollout\.quantization=fp8 needs a GPU"):
        arguments(folder, gpu=False, quantization="fp8")


def test_every_key_reaches_the_engine(folder: str) -> None:
    found = arguments(
        folder,
        dtype=Precision.FP16,
        attention_backend="fa3",
        tensor_parallel=4,
        data_parallel=2,
        expert_parallel=4,
        max_sequences=7,
        max_model_len=50,
        prefix_caching=False,
        chunked_prefill=False,
        enforce_eager=True,
        deterministic_kernels=True,
        extra_args={"page_size": 32},
    )
    expected = {
        "dtype": "float16",
        "attention_backend": "fa3",
        "tp_size": 4,
        "dp_size": 2,
        "enable_dp_attention": True,
        "ep_size": 4,
        "max_running_requests": 7,
        "context_length": 50 + module.SPARE,
        "disable_radix_cache": True,
        "chunked_prefill_size": -1,
        "disable_cuda_graph": True,
        "enable_memory_saver": True,
        "enable_deterministic_inference": True,
        "page_size": 32,
        "random_seed": 3,
    }
    assert {key: found[key] for key in expected} == expected


def test_what_gives_tokens_and_logprobs_their_meaning_is_fixed(folder: str) -> None:
    found = arguments(folder)
    fixed = {
        "load_format": "dummy",
        "sampling_backend": messages.SAMPLER,
        "custom_weight_loader": [messages.LOADER],
        "skip_tokenizer_init": True,
    }
    assert {key: found[key] for key in fixed} == fixed
    assert "attention_backend" not in found, "SGLang chooses for the device"
    assert fixed.keys() - {"sampling_backend"} <= OURS.keys()


def test_defaults_of_the_cpu(folder: str) -> None:
    found = arguments(folder, gpu=False)
    expected = {
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "enable_memory_saver": False,
        "disable_cuda_graph": True,
        # Keys and values of 4 layers, 4 heads and 16 numbers of fp32.
        "max_total_tokens": GIB // 4 // (2 * 4 * 4 * 16 * 4),
    }
    assert {key: found[key] for key in expected} == expected


def test_kernels_that_need_a_gpu_are_refused_without_one(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.deterministic_kernels=true needs a GPU"):
        arguments(folder, gpu=False, deterministic_kernels=True)


def test_a_dtype_without_kernels_is_refused_on_a_gpu(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"(?s)rollout\.dtype=fp32: .*rollout\.dtype=bf16"):
        arguments(folder, dtype=Precision.FP32)
    assert arguments(folder, gpu=False, dtype=Precision.FP32)["dtype"] == "float32"


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path=.* has no readable config\.json"):
        arguments(str(tmp_path))


RUN = [
    "engine=toy",
    "rollout=sglang",
    "algorithm=toy",
    "model.path=/m",
    "reward.target=a:b",
    "data.source=x.jsonl",
]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            [f"+rollout.extra_args.{key}=x"],
            rf"rollout\.extra_args\.{key} is not yours to set: {hint}",
        )
        for key, hint in (
            ("sampling_backend", "leave it out"),
            ("custom_weight_loader", "leave it out"),
            ("dtype", "set rollout.dtype"),
            ("tp_size", "set rollout.tensor_parallel"),
            ("mem_fraction_static", "set rollout.gpu_memory_gib"),
            ("api_key", "leave it out"),
            ("attention_backend", "set rollout.attention_backend"),
            ("enable_lora", "set rollout.max_lora_rank"),
            ("lora_paths", "leave it out"),
        )
    ]
    + [
        (
            ["deterministic=true", "rollout.per_request_seeds=false"],
            "deterministic=true needs rollout.per_request_seeds=true",
        ),
        (["rollout.mode=grpc"], r"rollout\.mode"),
        (
            [
                "rollout.max_lora_rank=8",
                "rollout.tensor_parallel=2",
                "rollout.data_parallel=2",
            ],
            r"rollout\.max_lora_rank=8 needs rollout\.data_parallel=1, it is 2: set one of them",
        ),
    ],
)
def test_what_would_change_the_meaning_is_said_before_the_start(
    options: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        compose(Plugins.load(), [*RUN, *options])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"gpu_memory_gib": 20.0}, {"mem_fraction_static": 0.25}),
        ({"kv_cache_gib": 8.0}, {"max_total_tokens": 8 * GIB // 1024}),
        (
            {"gpu_memory_gib": 20.0, "kv_cache_gib": 8.0},
            {"mem_fraction_static": 0.25, "max_total_tokens": 8 * GIB // 1024},
        ),
    ],
)
def test_memory_in_gib_becomes_a_part_of_what_is_free(
    settings: dict[str, float], expected: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GPU with 80 GiB free, where a token's cache has 1024 bytes in bf16."""
    monkeypatch.setattr(module, "free_bytes", lambda: 80 * GIB)
    config = SGLangConfig(**settings)  # type: ignore[arg-type]
    assert memory_arguments(config, SHAPE, "bfloat16", gpu=True) == pytest.approx(expected)


def test_more_memory_than_is_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda: 8 * GIB)
    with pytest.raises(ConfigError, match=r"rollout\.gpu_memory_gib=8 is more than is free"):
        memory_arguments(SGLangConfig(gpu_memory_gib=8.0), SHAPE, "bfloat16", gpu=True)


def test_capabilities_follow_the_configuration() -> None:
    backend = Plugins.load().get("rollout", "sglang")
    plain = backend.capabilities_of(SGLangConfig())
    adapted = backend.capabilities_of(SGLangConfig(max_lora_rank=8, sleep_mode=False))
    assert plain - adapted == {"memory:sleep", "model:moe"}
    assert adapted - plain == {"weights:lora"}
    routed = backend.capabilities_of(SGLangConfig(routed_experts=True))
    assert routed - plain == {"output:routed_experts"}


LAYER = {
    "model.layers.1.self_attn.q_proj.weight": (8, 4),
    "model.layers.1.mlp.up_proj.weight": (8, 4),
    "model.layers.1.input_layernorm.weight": (4,),
    "model.embed_tokens.weight": (9, 4),
}
EXPERT = {"model.layers.1.mlp.experts.0.down_proj.weight": (4, 8)}


def checkpoint(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    folder.mkdir()
    save_file(
        {name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "m.safetensors"
    )
    return folder


@pytest.mark.parametrize("gpu", [False, True])
def test_room_for_an_adapter_is_made_in_the_layers_alone(tmp_path: Path, gpu: bool) -> None:
    place = tmp_path / "adapter"
    found = adapter_arguments(6, checkpoint(tmp_path / "model", LAYER), place, gpu=gpu)
    layers = ["q_proj", "up_proj"]
    assert (found["max_lora_rank"], found["lora_target_modules"]) == (6, layers)
    assert found.get("lora_backend") == (None if gpu else "torch_native")
    assert found.keys() - {"lora_backend"} <= OURS.keys()
    assert json.loads((place / "adapter_config.json").read_text()) == {
        "peft_type": "LORA",
        "r": 6,
        "lora_alpha": 6,
        "target_modules": layers,
    }


@pytest.mark.parametrize(
    ("shapes", "lack"),
    [
        ({}, "has no checkpoint with names of layers"),
        ({**LAYER, **EXPERT}, "is a mixture of experts"),
    ],
)
def test_a_model_without_layers_for_an_adapter_is_refused(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], lack: str
) -> None:
    sentence = rf"(?s)rollout\.max_lora_rank=6 is for .* {lack}.*set:  rollout\.max_lora_rank=0"
    with pytest.raises(ConfigError, match=sentence):
        adapter_arguments(6, checkpoint(tmp_path / "model", shapes), tmp_path / "a", gpu=True)


@pytest.mark.parametrize(
    ("shape", "parallel", "expected"),
    [
        (SHAPE, {}, 2 * 4 * 4 * 16 * 2),
        (SHAPE, {"tensor_parallel": 2}, 2 * 4 * 2 * 16 * 2),
        (SHAPE, {"tensor_parallel": 8}, 2 * 4 * 1 * 16 * 2),
        (SHAPE, {"tensor_parallel": 8, "data_parallel": 4}, 2 * 4 * 2 * 16 * 2),
        ({**SHAPE, "head_dim": 64}, {}, 2 * 4 * 4 * 64 * 2),
        ({**SHAPE, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, {}, 4 * 576 * 2),
    ],
)
def test_bytes_of_a_token_s_cache(
    shape: dict[str, int], parallel: dict[str, int], expected: int
) -> None:
    assert bytes_per_token(shape, "bfloat16", SGLangConfig(**parallel)) == expected  # type: ignore[arg-type]


def test_another_release_is_refused_with_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "version", lambda name: "0.4.0")
    with pytest.raises(PluginError, match=r"sglang 0\.4\.0 is outside the range >=0\.5\.17"):
        version.installed()
