"""The memory that a plan foresees, against what the allocator counts on the CPU, and
against peaks that were measured on GPUs.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import info
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM

from coupler.engine_kit.memory_plan import GIB, Asked, Needs, Phase, total
from coupler.interfaces import Head, Memory, Model, Output, Part, Rank, Request
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
from coupler_engine_fsdp.config import FSDPConfig, HFConfig
from coupler_engine_fsdp.engine import FSDPEngine
from coupler_engine_fsdp.lora import Adapter
from coupler_engine_fsdp.memory import engine as engine_plan
from coupler_engine_fsdp.memory import rehearsal
from coupler_engine_fsdp.memory.rehearsal import Rehearsal, rehearse
from coupler_engine_fsdp.model import build, layers_of
from coupler_engine_fsdp.rollout import HFRollout

MEASURED = 0.15
LOGPROBS = (Output("logprobs"),)
WHOLE = {"gradient_checkpointing": False}
FP8 = {"precision": "fp8"}
EXPERTS = SMALL | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 64, "head_dim": 32}
# The kit has a step with the defaults, and one with small micro-batches.
TRAINED: dict[str, dict[str, Any]] = {
    "whole": WHOLE,
    "small micro-batches": {**WHOLE, "max_tokens_per_gpu": TOKENS // 2},
    "lora": {**WHOLE, "lora_rank": 8},
    "lora, recompute": {"lora_rank": 8},
    "bf16": {**WHOLE, "dtype": "bf16"},
    "bf16, small micro-batches": {"dtype": "bf16", "max_tokens_per_gpu": TOKENS // 2},
    "muon": {"optimizer": "muon"},
    "adamw8bit": {"optimizer": "adamw8bit"},
    "fp8": {**WHOLE, **FP8},
    "fp8, bf16": {**WHOLE, **FP8, "dtype": "bf16"},
    "fp8, recompute, small micro-batches": {**FP8, "max_tokens_per_gpu": TOKENS // 4},
    "fp8, tensorwise": {**FP8, "fp8_recipe": "tensorwise"},
    "adamw8bit, bf16": {**WHOLE, "optimizer": "adamw8bit", "dtype": "bf16"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("measured")
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**SMALL)).save_pretrained(path)
    return path


def planned(config: Any, model: Model, **facts: Any) -> Needs:
    known = {"gpu": False, "tokens": TOKENS, "longest": LENGTH, **facts}
    return config.memory_needs(Asked(path="engine", model=model, shape={}, **known))


def held(engine: FSDPEngine) -> int:
    tensors = [
        *engine.tensors.values(),
        *(c for pair in engine.masters.pairs.values() for c in pair),
    ]
    return storage_bytes(
        [*tensors, *(engine._optimizer.state().values() if engine._optimizer else ())]
    )


@pytest.mark.parametrize("name", TRAINED)
def test_training(folder: Path, name: str) -> None:
    trained(FSDPConfig(**TRAINED[name]), Model(str(folder)))


def trained(config: FSDPConfig, model: Model) -> None:
    """Hold what is planned against a step."""
    needs = planned(config, model, trains=True)
    engine = FSDPEngine(config, model)
    engine.setup(Rank())

    def train() -> None:
        engine.forward_backward(measured_batch(), LOGPROBS, surprise, info(measured_batch()))
        assert engine.step().applied

    train()
    assert total(needs.peaks[Phase.TRAINING]) == pytest.approx(peak_bytes(train), rel=MEASURED)
    parts = (term for terms in needs.held.values() for term in terms)
    assert total(parts) == pytest.approx(held(engine), rel=0.01)
    engine.close()


@pytest.mark.parametrize("sync_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "settings", [{}, {"lora_rank": 8}, {"offload_optimizer": True}], ids=["", "lora", "away"]
)
def test_weights_that_are_sent(
    folder: Path, settings: dict[str, Any], dtype: str, sync_dtype: str
) -> None:
    config = FSDPConfig(**settings, dtype=dtype, sync_dtype=sync_dtype)
    model = Model(str(folder))
    needs = planned(config, model, trains=True)
    engine = FSDPEngine(config, model)
    engine.setup(Rank())

    peak = peak_bytes(lambda: [None for _ in engine.weights()])
    small = 1 << 16
    assert total(needs.peaks[Phase.SYNC]) == pytest.approx(peak, rel=MEASURED, abs=small)


@pytest.mark.parametrize("settings", [WHOLE, {}, {**WHOLE, "lora_rank": 8}])
def test_what_the_backward_pass_reads(folder: Path, settings: dict[str, Any]) -> None:
    config, model = FSDPConfig(**settings), Model(str(folder))
    engine = FSDPEngine(config, model)
    engine.setup(Rank())
    saved: list[Any] = []

    def keep(tensor: Any) -> Any:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = engine._outputs(measured_batch(), LOGPROBS)
    own = storage_bytes(engine.tensors.values())
    read = storage_bytes([*saved, *engine.tensors.values()]) - own

    assert outputs["logprobs"].requires_grad
    assert rehearsed(config, model).saved == pytest.approx(read, rel=MEASURED)
    engine.close()


def rehearsed(config: FSDPConfig, model: Model) -> Rehearsal:
    policy = build(model, config.logits_tile or 2**21, config.recomputed)
    if config.lora_rank:
        Adapter(config).insert(policy.causal, layers_of(policy))
    return rehearse(policy, TOKENS, TOKENS - TOKENS // LENGTH, gpu=False, copies=True)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("targets", [[], ["all-linear"], ["all-linear", "experts"]])
def test_experts(tmp_path: Path, dtype: str, targets: list[str]) -> None:
    """An adapter has two grouped products more for each matrix of the experts."""
    config = AutoConfig.for_model(**EXPERTS)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    lora = {"lora_rank": 8, "target_modules": targets} if targets else {}
    trained(FSDPConfig(**WHOLE, dtype=dtype, **lora), Model(str(tmp_path)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_moments_and_masters_in_host_memory_are_planned_there(folder: Path, dtype: str) -> None:
    model = Model(str(folder))
    plain = planned(FSDPConfig(dtype=dtype), model, trains=True)
    away = planned(FSDPConfig(dtype=dtype, offload_optimizer=True), model, trains=True)
    moments, params = (total(plain.held[part]) for part in (Part.OPTIMIZER, Part.PARAMS))
    masters = moments // 2 if dtype == "bf16" else 0
    assert (plain.host, away.host) == (0, moments + masters)
    assert away.held.keys() == {Part.PARAMS}
    assert total(away.held[Part.PARAMS]) == params - masters
    # A model this small is one piece.
    step = total(plain.peaks[Phase.TRAINING])
    assert step <= total(away.peaks[Phase.TRAINING]) <= step + moments + masters
    reference = planned(FSDPConfig(offload_optimizer=True), Model(str(folder), frozen=True))
    assert reference.host == 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_frozen_reference(folder: Path, dtype: str) -> None:
    config, model = FSDPConfig(dtype=dtype), Model(str(folder), frozen=True)
    needs = planned(config, model)
    engine = FSDPEngine(config, model)
    engine.setup(Rank())

    peak = peak_bytes(lambda: engine.forward(measured_batch(), LOGPROBS))
    assert total(needs.peaks[Phase.LOGPROBS]) == pytest.approx(peak, rel=MEASURED)
    assert needs.held.keys() == {Part.PARAMS}
    assert total(needs.held[Part.PARAMS]) == pytest.approx(held(engine), rel=0.01)
    assert Phase.TRAINING not in needs.peaks
    engine.close()


def test_an_equal_question_is_not_rehearsed_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsed: list[int] = []

    def count(*given: Any, **named: Any) -> Rehearsal:
        rehearsed.append(1)
        return rehearse(*given, **named)

    monkeypatch.setattr(engine_plan, "rehearse", count)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = Asked(path="engine", model=Model(str(tmp_path)), shape={}, trains=True, tokens=64)
    first = FSDPConfig().memory_needs(asked)
    assert FSDPConfig().memory_needs(asked) == first
    assert len(rehearsed) == 1

    config["num_hidden_layers"] += 1
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert FSDPConfig().memory_needs(asked).parameters > first.parameters
    assert FSDPConfig(dtype="fp32").memory_needs(asked) != first
    assert len(rehearsed) == 3


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize(
    "settings", [{}, {"dtype": "bf16"}, {"lora_rank": 4}, {"precision": "fp8"}], ids=str
)
@pytest.mark.parametrize("shape", [SMALL, EXPERTS], ids=["dense", "experts"])
def test_operations_that_come_again_take_the_same(
    shape: dict[str, Any],
    settings: dict[str, Any],
    gpu: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    AutoConfig.for_model(**shape).save_pretrained(tmp_path)
    config, tokens = FSDPConfig(**settings), {"tokens": 512, "longest": 128}
    found = []
    for looks_up in (rehearsal._makes_new_tensors, lambda _: False):
        monkeypatch.setattr(rehearsal, "_makes_new_tensors", looks_up)
        monkeypatch.setattr(engine_plan, "_kept", {})
        found.append(planned(config, Model(str(tmp_path)), trains=True, gpu=gpu, **tokens))
    assert found[0] == found[1]


def test_a_critic_has_no_logits(folder: Path) -> None:
    config, model = FSDPConfig(**WHOLE), Model(str(folder), head=Head.VALUE)
    needs = planned(config, model, trains=True)
    engine = FSDPEngine(config, model)
    engine.setup(Rank())
    values = (Output("values"),)

    def train() -> None:
        engine.forward_backward(measured_batch(), values, of_values, info(measured_batch()))
        assert engine.step().applied

    train()
    assert total(needs.peaks[Phase.TRAINING]) == pytest.approx(peak_bytes(train), rel=MEASURED)
    engine.close()


def of_values(outputs: Any, _: Any) -> Any:
    return (outputs["values"] - 1) ** 2, {}


def test_what_ranks_share(folder: Path) -> None:
    """Ranks have a part of the state each, and gather a layer at a time."""
    one, four, hybrid = (
        planned(FSDPConfig(dtype="bf16", **settings), Model(str(folder)), trains=True)
        for settings in ({}, {"ranks": 4}, {"ranks": 4, "fsdp_size": 2})
    )
    count = one.parameters
    assert total(one.held[Part.PARAMS]) == 6 * count, "masters, and copies to compute with"
    assert total(four.held[Part.PARAMS]) == count, "a quarter of the masters"
    assert total(hybrid.held[Part.PARAMS]) == 2 * count
    assert total(four.held[Part.OPTIMIZER]) == 2 * count
    gathered = [term for term in four.peaks[Phase.TRAINING] if "FSDP" in term.what]
    assert 0 < total(gathered) < 10 * count


def test_a_gpu_computes_in_bf16_and_with_larger_tiles(folder: Path) -> None:
    on_cpu, on_gpu = (
        planned(FSDPConfig(), Model(str(folder)), trains=True, gpu=gpu) for gpu in (False, True)
    )
    assert total(on_gpu.held[Part.PARAMS]) == 1.5 * total(on_cpu.held[Part.PARAMS])


@pytest.mark.parametrize("recipe", ["rowwise_with_gw_hp", "rowwise", "tensorwise"])
def test_operands_in_fp8_on_a_gpu(folder: Path, recipe: str) -> None:
    """A compiled product holds two. Single operations hold their fp32 too, but in this
    model less than the logits.
    """
    plain, compiled, eager = (
        planned(FSDPConfig(**settings), Model(str(folder)), trains=True, gpu=True)
        for settings in (
            {"compile": True},
            {**FP8, "fp8_recipe": recipe, "compile": True},
            {**FP8, "fp8_recipe": recipe},
        )
    )
    widest, width = SMALL["intermediate_size"], SMALL["hidden_size"]
    for phase in (Phase.LOGPROBS, Phase.TRAINING):
        more = total(compiled.peaks[phase]) - total(plain.peaks[phase])
        assert more == TOKENS * widest + width * widest
        assert total(eager.peaks[phase]) >= total(plain.peaks[phase])
    assert eager.held == plain.held


@pytest.mark.parametrize("prompt", [192, 24])
def test_sampling(folder: Path, prompt: int) -> None:
    """The cache of short prompts grows more often than that of long ones."""
    config, model = HFConfig(), Model(str(folder))
    needs = planned(config, model, sequences=16, prompt=prompt)
    assert total(needs.held[Memory.WEIGHTS]) == 4 * needs.parameters
    random = np.random.default_rng(0).integers(4, 2048, (16, prompt)).tolist()
    requests = [Request(tuple(row), LENGTH - prompt, seed=i) for i, row in enumerate(random)]

    async def generate(rollout: HFRollout) -> None:
        await asyncio.gather(*map(rollout.generate, requests))

    with asyncio.Runner() as runner:
        rollout = HFRollout(config, model)
        runner.run(rollout.setup(Rank()))
        peak = peak_bytes(lambda: runner.run(generate(rollout)))
    assert total(needs.peaks[Phase.SAMPLING]) == pytest.approx(peak, rel=MEASURED)


@pytest.mark.parametrize(
    ("shape", "tokens", "settings", "gib"),
    [
        ("1.5b", 16_384, WHOLE, 66.4),
        ("1.5b", 16_384, {**WHOLE, "compile": True}, 53),
        ("1.5b", 4 * 16_384, {**WHOLE, "compile": True}, 58),
        ("1.5b", 32_768, {"max_tokens_per_gpu": 32_768}, 27.6),
        ("1.5b", 65_536, {"max_tokens_per_gpu": 32_768, "ranks": 2, "sequence_parallel": 2}, 17.0),
        ("7b", 16_384, {"ranks": 4}, 35.0),
        ("moe", 16_384, {**WHOLE, "ranks": 2}, 60.8),
    ],
)
def test_peaks_of_docs_measurements(
    tmp_path: Path, shape: str, tokens: int, settings: dict[str, Any], gib: float
) -> None:
    """They are those of training steps on one to four GPUs."""
    AutoConfig.for_model(**LARGE[shape]).save_pretrained(tmp_path)
    facts = {"trains": True, "gpu": True, "tokens": tokens, "longest": 2048}
    needs = planned(FSDPConfig(**settings), Model(str(tmp_path)), **facts)
    parts = [term for terms in needs.held.values() for term in terms]
    found = total(parts) + total(needs.peaks[Phase.TRAINING])
    assert found / GIB == pytest.approx(gib, rel=0.05)
