"""Keys of rollout=vllm, and the engine arguments that they become."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from coupler.cli import main
from coupler.config.checks import longest_sequence
from coupler.config.compose import compose
from coupler.config.schema import Job
from coupler.engine_kit.inference.checkpoint import (
    checkpoint_names,
    checkpoint_tensors,
    linear_maps,
)
from coupler.errors import ConfigError, PluginError
from coupler.interfaces import Model, Rank
from coupler.plugins.manager import Plugins
from coupler_rollout_vllm.arguments import (
    GIB,
    adapter_arguments,
    engine_arguments,
    memory_arguments,
)
from coupler_rollout_vllm.compat import engine, version
from coupler_rollout_vllm.config import Precision, VLLMConfig
from coupler_rollout_vllm.worker.extension import answering

MODEL = Model("/m")


def arguments(**settings: object) -> dict[str, object]:
    return engine_arguments(VLLMConfig(**settings), MODEL, Rank(seed=2**40 + 3))  # type: ignore[arg-type]


def test_a_judge_loads_the_weights_of_its_folder() -> None:
    own = engine_arguments(VLLMConfig(), replace(MODEL, own_weights=True), Rank())
    assert (own["load_format"], arguments()["load_format"]) == ("auto", "dummy")


@pytest.mark.parametrize(
    "key", ["tensor_parallel", "max_sequences", "max_batched_tokens", "kv_cache_gib"]
)
def test_values_out_of_range_name_the_key(key: str) -> None:
    with pytest.raises(ValueError, match=f"rollout.{key} must be at least"):
        VLLMConfig(**{key: -1})  # type: ignore[arg-type]


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
            "takes no adapter apart from the weights: set rollout.max_lora_rank=0",
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
        VLLMConfig(**settings)  # type: ignore[arg-type]


def test_weights_are_quantised_from_16_bits() -> None:
    found = arguments(quantization="fp8")
    assert (found["quantization"], found["dtype"]) == ("fp8_per_channel", "bfloat16")
    assert "quantization" not in arguments()


def test_every_key_reaches_the_engine() -> None:
    found = arguments(
        dtype=Precision.FP16,
        tensor_parallel=2,
        max_sequences=7,
        max_batched_tokens=99,
        max_model_len=50,
        kv_cache_gib=0.5,
        prefix_caching=False,
        chunked_prefill=False,
        enforce_eager=True,
        extra_args={"block_size": 32},
    )
    expected = {
        "dtype": "float16",
        "tensor_parallel_size": 2,
        "max_num_seqs": 7,
        "max_num_batched_tokens": 99,
        "max_model_len": 50,
        "kv_cache_memory_bytes": GIB // 2,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "enforce_eager": True,
        "block_size": 32,
        "seed": 3,
    }
    assert {key: found[key] for key in expected} == expected


def test_what_gives_tokens_and_logprobs_their_meaning_is_fixed() -> None:
    found = arguments()
    fixed = {
        "load_format": "dummy",
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
    }
    assert {key: found[key] for key in fixed} == fixed


RUN = [
    "engine=toy",
    "rollout=vllm",
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
            ("logprobs_mode", "leave it out"),
            ("weight_transfer_config", "leave it out"),
            ("dtype", "set rollout.dtype"),
            ("data_parallel_size", "set rollout.replicas"),
            ("pipeline_parallel_size", "set rollout.tensor_parallel"),
            ("enable_lora", "set rollout.max_lora_rank"),
        )
    ]
    + [
        (
            ["sampling.temperature=2.5"],
            r"sampling\.temperature must be 0, or between 0\.01 and 2, for rollout=vllm",
        ),
        (["sampling.temperature=0.001"], r"sampling\.temperature must be 0, or between"),
        (["eval.temperature=3"], r"eval\.temperature must be 0, or between 0\.01 and 2"),
        (
            ["rollout.dtype=fp32", "rollout.max_lora_rank=8"],
            r"rollout\.max_lora_rank needs 16 bits on a GPU",
        ),
    ],
)
def test_what_vllm_would_refuse_or_get_wrong_is_said_before_the_start(
    monkeypatch: pytest.MonkeyPatch, options: list[str], sentence: str
) -> None:
    monkeypatch.setattr("coupler_rollout_vllm.plugin.gpu_is_visible", lambda: True)
    with pytest.raises(ConfigError, match=sentence):
        compose(Plugins.load(), [*RUN, *options])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"gpu_memory_gib": 20.0}, {"gpu_memory_utilization": 0.25}),
        ({"kv_cache_gib": 8.0}, {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 8 * GIB}),
        (
            {"gpu_memory_gib": 20.0, "kv_cache_gib": 8.0},
            {"gpu_memory_utilization": 0.25, "kv_cache_memory_bytes": 8 * GIB},
        ),
        ({"gpu_memory_gib": 80.0}, {"gpu_memory_utilization": 1.0}),
    ],
)
def test_memory_in_gib_becomes_a_part_of_the_device(
    settings: dict[str, float], expected: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GPU of 80 GiB."""
    monkeypatch.setattr(engine, "device_bytes", lambda: 80 * GIB)
    assert memory_arguments(VLLMConfig(**settings), gpu=True) == pytest.approx(expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["gpu_memory_gib", "kv_cache_gib"])
def test_more_memory_than_the_device_has_is_refused(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "device_bytes", lambda: 80 * GIB)
    with pytest.raises(
        ConfigError, match=rf"rollout\.{key}=81 is more than the device has, 80\.0\."
    ):
        memory_arguments(VLLMConfig(**{key: 81.0}), gpu=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("found", ["0.25.1", "0.33.0", "0.33.0rc1", "1.0"])
def test_another_release_of_vllm_is_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "version", lambda name: found)
    with pytest.raises(PluginError) as refused:
        version.installed()
    assert str(refused.value) == (
        f"vllm {found} is outside the range >=0.26,<0.33 that rollout=vllm was tested with.\n"
        "  try:  pip install 'vllm>=0.26,<0.33'"
    )


@pytest.mark.parametrize("found", ["0.26.0", "0.26.0+cu129", "0.32.0", "0.32.1.dev3"])
def test_a_release_of_the_tested_range_is_taken(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "version", lambda name: found)
    assert version.installed() == ("vllm", found)


def test_a_model_worker_that_runs_out_of_memory_says_so_by_its_class() -> None:
    """What core names the phase by: see coupler.loop.device_memory."""

    @answering
    def full(_worker: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    @answering
    def broken(_worker: object) -> None:
        raise RuntimeError("an illegal instruction")

    assert full(None) == {"error": ["MemoryError", "CUDA out of memory. Tried to allocate 2 GiB"]}
    with pytest.raises(RuntimeError, match="illegal"):
        broken(None)


def test_capabilities_follow_the_configuration() -> None:
    backend = Plugins.load().get("rollout", "vllm")
    assert "memory:sleep" in backend.capabilities_of(VLLMConfig())
    assert "memory:sleep" not in backend.capabilities_of(VLLMConfig(sleep_mode=False))
    assert "weights:lora" not in backend.capabilities_of(VLLMConfig())
    assert "weights:lora" in backend.capabilities_of(VLLMConfig(max_lora_rank=8))


def write_checkpoint(folder: Path, **shapes: tuple[int, ...]) -> Path:
    save_file(
        {name.replace("__", "."): torch.zeros(shape) for name, shape in shapes.items()},
        folder / "m.safetensors",
    )
    return folder


LAYER = {
    "model__layers__1__self_attn__q_proj__weight": (8, 4),
    "model__layers__1__mlp__up_proj__weight": (8, 4),
    "model__layers__1__self_attn__q_proj__bias": (8,),
    "model__layers__1__input_layernorm__weight": (4,),
    "model__embed_tokens__weight": (9, 4),
    "lm_head__weight": (9, 4),
}
EXPERTS = {
    "model__layers__1__mlp__gate__weight": (2, 4),
    "model__layers__1__mlp__experts__0__down_proj__weight": (4, 8),
}


def test_room_for_an_adapter_is_made_in_the_layers_alone(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, **LAYER)
    for rank, size in ((1, 1), (2, 8), (16, 16), (257, 320), (512, 512)):
        assert adapter_arguments(rank, folder, Precision.BF16, gpu=True) == {
            "enable_lora": True,
            "max_lora_rank": size,
            "max_loras": 1,
            "lora_target_modules": ["q_proj", "up_proj"],
        }
    assert linear_maps(write_checkpoint(tmp_path, **LAYER, **EXPERTS)) == ["q_proj", "up_proj"]


def test_a_folder_may_have_an_index_and_not_its_files(tmp_path: Path) -> None:
    """As where a rollout runs whose weights come over the wire."""
    write_checkpoint(tmp_path, a=(2, 3))
    listed = {"weight_map": {"a": "m.safetensors", "b": "of-another-host.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(listed))
    assert checkpoint_tensors(tmp_path) == {"a": (2, 3)}
    assert checkpoint_names(tmp_path) == {"a", "b"}


def test_adapters_that_no_kernel_takes_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, **LAYER, **EXPERTS)
    with pytest.raises(
        ConfigError,
        match=r"(?s)rollout.max_lora_rank needs 16 bits on a GPU.*try:  rollout.dtype=bf16",
    ):
        adapter_arguments(8, folder, Precision.FP32, gpu=True)
    with pytest.raises(
        ConfigError, match=r"rollout.max_lora_rank with a mixture of experts needs a GPU"
    ):
        adapter_arguments(8, folder, Precision.FP32, gpu=False)


LENGTHS = [
    (["train"], "data.max_prompt_tokens + sampling.max_tokens = 128"),
    (
        ["train", "eval.every_steps=1", "data.max_prompt_tokens=90"],
        "eval.data.max_prompt_tokens + eval.max_tokens = 150",
    ),
    (["eval"], "eval.data.max_prompt_tokens + eval.max_tokens = 150"),
    (["eval", "eval.max_tokens=0"], "eval.data.max_prompt_tokens + sampling.max_tokens = 128"),
]


@pytest.mark.parametrize(("given", "what"), LENGTHS)
def test_sequences_that_do_not_fit_are_refused_before_the_start(
    given: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job, *more = given
    options = {
        "engine": "toy",
        "rollout": "vllm",
        "model.path": "/m",
        "reward.target": "a:b",
        "data.source": "x.jsonl",
        "eval.data.source": "x.jsonl",
        "data.max_prompt_tokens": 100,
        "sampling.max_tokens": 28,
        "eval.data.max_prompt_tokens": 100,
        "eval.max_tokens": 50,
        "rollout.max_model_len": 120,
    }
    options |= {"algorithm": "toy"} if job == "train" else {}
    overrides = [*(f"{key}={value}" for key, value in options.items()), *more]
    longest = what.rpartition(" ")[2]
    with pytest.raises(
        ConfigError,
        match=re.escape(f"rollout.max_model_len=120 is less than one sequence can have: {what}"),
    ):
        compose(Plugins.load(), overrides, job=Job(job))
    compose(Plugins.load(), [*overrides, f"rollout.max_model_len={longest}"], job=Job(job))
    config = compose(Plugins.load(), [*overrides, "rollout.max_model_len=0"], job=Job(job)).config
    assert config.rollout.for_run(longest_sequence(config, "rollout")).max_model_len >= int(longest)
    if given == ["train"]:
        assert main(["plan", *overrides]) == 2
        assert (
            f"set rollout.max_model_len={longest}, or one of those lower."
            in capsys.readouterr().err
        )


def test_a_deterministic_run_needs_seeds_per_request() -> None:
    options = [*RUN, "deterministic=true"]
    compose(Plugins.load(), options)
    with pytest.raises(
        ConfigError, match=r"deterministic=true needs rollout\.per_request_seeds=true"
    ):
        compose(Plugins.load(), [*options, "rollout.per_request_seeds=false"])
