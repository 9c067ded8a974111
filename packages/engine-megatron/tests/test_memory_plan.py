"""The memory that a plan foresees, against what PyTorch's allocator counts on the CPU,
and against peaks that were measured on GPUs.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from coupler.engine_kit.memory_plan import GIB, Asked, Needs, Phase, total
from coupler.interfaces import Model, Output, Part, Rank, StepInfo
from coupler.testing.memory import (
    LARGE,
    LENGTH,
    SMALL,
    TOKENS,
    measured_batch,
    peak_bytes,
    storage_bytes,
    surprise,
)
from coupler_engine_megatron.config import MegatronConfig
from coupler_engine_megatron.engine import MegatronEngine

MEASURED = 0.15
LOGPROBS = (Output("logprobs"),)
WHOLE = {"gradient_checkpointing": "none"}
# The kit has a step with the defaults, also of experts and with small micro-batches.
TRAINED: dict[str, dict[str, Any]] = {
    "whole": WHOLE,
    "small micro-batches": {**WHOLE, "max_tokens_per_gpu": TOKENS // 2},
    "recompute": {},
    "some layers": {"recompute_method": "block", "recompute_num_layers": 2},
    "a layer": {"recompute_method": "block", "recompute_num_layers": 1},
    "auto, without a plan": {"gradient_checkpointing": "auto"},
    "lora": {**WHOLE, "lora_rank": 8},
    "bf16": {**WHOLE, "dtype": "bf16"},
    "selective": {"gradient_checkpointing": "selective", "recompute_modules": ["mlp"]},
}

EXPERTS = {"lora_rank": 16, "target_modules": ["all-linear", "experts"]}
ROUTED: dict[str, dict[str, Any]] = {
    **{name: TRAINED[name] for name in ("whole", "bf16", "selective", "lora")},
    "lora of experts": EXPERTS,
    "lora of experts, whole": {**WHOLE, **EXPERTS},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("measured")
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**SMALL)).save_pretrained(path)
    return path


def planned(config: MegatronConfig, model: Model, **facts: Any) -> Needs:
    shape = json.loads((Path(model.path) / "config.json").read_text())
    return config.memory_needs(Asked(path="engine", model=model, shape=shape, **facts))


def held(engine: MegatronEngine) -> int:
    found = engine._optimizer
    state = [*found.gradients(), *found.states()] if found else []
    return storage_bytes([*(p for chunk in engine.chunks for p in chunk.parameters()), *state])


@pytest.mark.parametrize("name", TRAINED)
def test_training(folder: Path, name: str) -> None:
    trained(MegatronConfig(**TRAINED[name]), Model(str(folder)))


@pytest.mark.parametrize("name", ROUTED)
def test_experts(name: str, tmp_path: Path) -> None:
    """With experts' adapters there are more numbers in them than in the layers beside
    the experts.
    """
    shape = {**SMALL, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(**shape, moe_intermediate_size=64, head_dim=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    trained(MegatronConfig(**ROUTED[name]), Model(str(tmp_path)))


@pytest.mark.parametrize("name", ["whole", "bf16", "recompute"])
def test_heads_with_norms(name: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(**{**SMALL, "model_type": "qwen3"}, head_dim=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    trained(MegatronConfig(**TRAINED[name]), Model(str(tmp_path)))


def trained(config: MegatronConfig, model: Model) -> None:
    """Hold a plan against what a step takes."""
    needs = planned(config, model, trains=True, gpu=False, tokens=TOKENS, longest=LENGTH)
    engine = MegatronEngine(config, model)
    engine.setup(Rank())

    def train() -> None:
        engine.forward_backward(measured_batch(), LOGPROBS, surprise, StepInfo(TOKENS, 0))
        assert engine.step().applied

    train()
    assert total(needs.peaks[Phase.TRAINING]) == pytest.approx(peak_bytes(train), rel=MEASURED)
    parts = (term for terms in needs.held.values() for term in terms)
    assert total(parts) == pytest.approx(held(engine), rel=0.02)
    engine.close()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ranks": 2, "tensor_parallel": 2},
        {"ranks": 4, "pipeline_parallel": 4},
        {"ranks": 2, "pipeline_parallel": 2, "virtual_pipeline": 2},
    ],
    ids=str,
)
def test_auto_takes_the_fewest_layers_that_fit(tmp_path: Path, settings: dict[str, Any]) -> None:
    AutoConfig.for_model(**LARGE["1.5b"]).save_pretrained(tmp_path)
    every = 28 // (settings.get("pipeline_parallel", 1) * settings.get("virtual_pipeline", 1))
    facts = {"trains": True, "tokens": 8 * 16_384, "longest": 2048}
    model = Model(str(tmp_path))
    config = MegatronConfig(gradient_checkpointing="auto", **settings)
    asked = Asked(
        path="engine", model=model, shape=AutoConfig.for_model(**LARGE["1.5b"]).to_dict(), **facts
    )

    def training(needs: Needs) -> int:
        return total(needs.peaks[Phase.TRAINING])

    none, all_ = (
        config.choose_recompute(asked, lambda _, fits=fits: fits) for fits in (True, False)
    )
    assert (none.layers, all_.layers, none.every) == (0, every, every)
    assert none.config == replace(config, gradient_checkpointing="none")
    assert all_.config == replace(config, gradient_checkpointing="full")
    assert config.choose_recompute(asked, None) == all_

    room = (training(none.needs) + training(all_.needs)) // 2
    some = config.choose_recompute(asked, lambda needs: training(needs) <= room)
    assert 0 < some.layers < every
    assert training(some.needs) <= room
    assert (some.config.recompute_method, some.config.recompute_num_layers) == (
        "block",
        some.layers,
    )


def test_a_frozen_reference(folder: Path) -> None:
    config, model = MegatronConfig(), Model(str(folder), frozen=True)
    needs = planned(config, model, gpu=False, tokens=TOKENS, longest=LENGTH)
    engine = MegatronEngine(config, model)
    engine.setup(Rank())

    peak = peak_bytes(lambda: engine.forward(measured_batch(), LOGPROBS))
    assert total(needs.peaks[Phase.LOGPROBS]) == pytest.approx(peak, rel=MEASURED)
    assert needs.held.keys() == {Part.PARAMS}
    assert total(needs.held[Part.PARAMS]) == pytest.approx(held(engine), rel=0.01)
    engine.close()


@pytest.mark.parametrize(
    ("shape", "settings", "gib"),
    [
        ("1.5b", WHOLE, 58.6),
        ("7b", {"ranks": 2, "tensor_parallel": 2}, 67.5),
        ("7b", {**WHOLE, "ranks": 2, "tensor_parallel": 2}, 99.5),
        ("7b", {**WHOLE, "ranks": 4, "tensor_parallel": 2}, 78.2),
        ("moe", {**WHOLE, "ranks": 4, "expert_parallel": 4}, 43.4),
        ("moe", {**WHOLE, "ranks": 2, "expert_parallel": 2}, 65.8),
    ],
)
def test_peaks_of_docs_measurements(
    tmp_path: Path, shape: str, settings: dict[str, Any], gib: float
) -> None:
    """They are those of "A training step of engine=megatron", on H200s."""
    AutoConfig.for_model(**LARGE[shape]).save_pretrained(tmp_path)
    config = MegatronConfig(**settings)
    needs = planned(config, Model(str(tmp_path)), trains=True, tokens=16_384, longest=2048)
    parts = [term for terms in needs.held.values() for term in terms]
    found = total(parts) + total(needs.peaks[Phase.TRAINING])
    assert found / GIB == pytest.approx(gib, rel=0.05)


def test_stages_hold_their_layers_and_the_micro_batches_before(tmp_path: Path) -> None:
    """The first stage of four has four micro-batches on the way, where there are as
    many.
    """
    AutoConfig.for_model(**LARGE["7b"]).save_pretrained(tmp_path)
    config = MegatronConfig(**WHOLE, ranks=4, pipeline_parallel=4, max_tokens_per_gpu=4096)
    model = Model(str(tmp_path))
    one, many = (
        planned(config, model, trains=True, tokens=4096 * number, longest=2048) for number in (1, 8)
    )
    first, four = one.peaks[Phase.TRAINING][0], many.peaks[Phase.TRAINING][0]
    assert four.size == pytest.approx(4 * first.size, rel=0.01)
    assert total(many.held[Part.PARAMS]) == pytest.approx(2 * one.parameters / 4, rel=0.15)
