"""LoRA of experts: gradients, the sum that a rollout gets, checkpoints, and PEFT."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import WANT, arrays, info, loss, make_batch, make_engine, reference, worst
from peft import PeftModel
from transformers import AutoModelForCausalLM

from coupler.engine_kit.lora_names import names_of, start_of
from coupler.engine_kit.peft_folder import write_adapter
from coupler.errors import ConfigError
from coupler.interfaces import EVERYTHING, Output
from coupler_engine_fsdp.config import FSDPConfig
from coupler_engine_fsdp.engine import FSDPEngine
from coupler_engine_fsdp.plugin import coupler_backends

Folder = Callable[[str], Path]
# No multiple of the columns of a grouped product.
RANK, ALPHA = 6, 12.0
LORA: dict[str, Any] = {
    "lora_rank": RANK,
    "lora_alpha": ALPHA,
    "lr": 1e-2,
    "target_modules": ["all-linear", "experts"],
}
# The targets, and the ends of the names of what they adapt.
TARGETS: dict[str, tuple[list[str], str]] = {
    "all": (["all-linear", "experts"], r"_proj"),
    "experts": (["experts"], r"experts\.\d\..*_proj"),
    "last layer": (["q_proj", "1.mlp.experts"], r"(q_proj|layers\.1\.mlp\..*_proj)"),
}


@pytest.fixture
def engine(folder_of: Folder) -> FSDPEngine:
    return make_engine(folder_of("experts"), **LORA)


def train(engine: FSDPEngine, steps: int = 2) -> None:
    for index in range(steps):
        batch = make_batch(seed=index)
        engine.forward_backward(batch, WANT, loss, info(batch, index))
        assert engine.step().applied


def merged_model(engine: FSDPEngine, folder: Path) -> FSDPEngine:
    """Return an engine without adapters whose weights are those that were sent."""
    plain = make_engine(folder, dtype="fp32")
    with torch.no_grad():
        for name, tensor in engine.weights():
            stacked = next((n for n, places in plain.experts.items() if name in places), None)
            if stacked:
                plain.experts[stacked][name].of(plain.named[stacked]).copy_(tensor)
            else:
                plain.named[name].copy_(tensor)
    return plain


def test_it_starts_as_the_model(engine: FSDPEngine, folder_of: Folder) -> None:
    """B is 0, and A is drawn by the name of each expert's matrix."""
    outputs, _ = reference(folder_of("experts"))
    got = engine.forward(make_batch(), WANT)["logprobs"]
    np.testing.assert_allclose(got, outputs["logprobs"], atol=5e-5)
    adapter = arrays(engine.adapter_weights())
    assert len(adapter) == 2 * 2 * (4 + 5 * 3), "two layers of four maps and five experts"

    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    a, b = names_of(name)
    np.testing.assert_array_equal(adapter[a], start_of(name, RANK, 48, 0))
    assert adapter[b].shape == (16, RANK) and not adapter[b].any()


@pytest.mark.parametrize("targets", TARGETS)
def test_gradients_follow_from_those_of_the_weights(folder_of: Folder, targets: str) -> None:
    """With W + s B A for W: dB = s dW A^T and dA = s B^T dW, here after steps."""
    names, ends = TARGETS[targets]
    engine = make_engine(folder_of("experts"), **{**LORA, "target_modules": names})
    train(engine)
    batch = make_batch(seed=5)
    plain = merged_model(engine, folder_of("experts"))
    for each in (engine, plain):
        each.forward_backward(batch, WANT, loss, info(batch, 2))

    dense, adapter, want = arrays(plain.gradients()), arrays(engine.adapter_weights()), {}
    for name, gradient in dense.items():
        if re.search(rf"{ends}\.weight$", name):
            a, b = names_of(name)
            # adapter[b] holds the scale already.
            want[a] = adapter[b].T @ gradient
            want[b] = ALPHA / RANK * gradient @ adapter[a].T
    assert len(want) == len(adapter)
    assert worst(arrays(engine.gradients()), want) < 5e-5


def test_a_rollout_gets_the_sum(engine: FSDPEngine, folder_of: Folder) -> None:
    """Its log-probs are the engine's, and base + scale B A is what was sent."""
    train(engine)
    plain, batch = merged_model(engine, folder_of("experts")), make_batch(seed=9)
    got, want = (e.forward(batch, WANT)["logprobs"] for e in (engine, plain))
    np.testing.assert_allclose(got, want, atol=2e-5)

    base, adapter = arrays(engine.base_weights()), arrays(engine.adapter_weights())
    for name, tensor in arrays(engine.weights()).items():
        a, b = names_of(name)
        update = adapter[b] @ adapter[a] if a in adapter else 0.0
        np.testing.assert_allclose(base[name] + update, tensor, atol=1e-6, err_msg=name)
        assert (a in adapter) == ("_proj" in name)


def test_bf16_is_near_fp32(folder_of: Folder) -> None:
    """Copies of what trains are bf16, the masters fp32."""
    losses = {}
    for dtype in ("fp32", "bf16"):
        engine = make_engine(folder_of("experts"), **LORA, dtype=dtype)
        train(engine)
        losses[dtype] = engine.forward(make_batch(seed=9), WANT)["logprobs"]
    assert np.abs(losses["bf16"] - losses["fp32"]).mean() < 0.1


def test_without_the_adapter_it_is_the_reference(engine: FSDPEngine) -> None:
    base = (Output("base_logprobs"),)
    before = engine.forward(make_batch(), base)["base_logprobs"]
    train(engine)
    np.testing.assert_array_equal(engine.forward(make_batch(), base)["base_logprobs"], before)
    assert np.abs(engine.forward(make_batch(), WANT)["logprobs"] - before).max() > 1e-2


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_checkpoint_continues_to_the_bit(
    folder_of: Folder, tmp_path: Path, optimizer: str
) -> None:
    settings = {**LORA, "optimizer": optimizer}
    engine = make_engine(folder_of("experts"), **settings)
    train(engine)
    engine.save(tmp_path, EVERYTHING).wait(60)
    resumed = make_engine(folder_of("experts"), **settings)
    resumed.load(tmp_path, EVERYTHING)
    for each in (engine, resumed):
        train(each, 1)
    assert worst(arrays(resumed.weights()), arrays(engine.weights())) == 0


def test_another_optimizer_reads_the_experts_of_a_checkpoint(
    folder_of: Folder, tmp_path: Path
) -> None:
    """Then each expert's A and B are read by their neutral names."""
    engine = make_engine(folder_of("wide-experts"), **{**LORA, "lora_rank": 64})
    train(engine)
    engine.save(tmp_path, EVERYTHING).wait(60)
    settings = {**LORA, "lora_rank": 64, "optimizer": "adamw8bit"}
    second = make_engine(folder_of("wide-experts"), **settings)
    assert any("experts.lora_A" in name for name in second.blocks)
    second.load(tmp_path, EVERYTHING)
    assert worst(arrays(second.weights()), arrays(engine.weights())) == 0


@pytest.mark.parametrize("targets", ["all", "experts"])
def test_peft_loads_an_export(folder_of: Folder, tmp_path: Path, targets: str) -> None:
    """Its logits are those of the weights that a rollout gets."""
    engine = make_engine(folder_of("experts"), **{**LORA, "target_modules": TARGETS[targets][0]})
    train(engine)
    folder, adapter = folder_of("experts"), tmp_path / "adapter"
    write_adapter(engine.adapter_weights(), adapter, str(folder), write=True)
    tokens = torch.from_numpy(make_batch(seed=3)["tokens"][None, :20].astype(np.int64))

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = plain(tokens).logits.detach()
    found = PeftModel.from_pretrained(plain, adapter)(tokens).logits.detach()
    want = merged_model(engine, folder).policy.causal
    want.set_attn_implementation("eager")
    logits = want(tokens).logits.detach()
    np.testing.assert_allclose(found, logits, atol=2e-4)
    assert float((logits - before).abs().max()) > 1e-2


def test_an_export_is_where_training_starts(
    engine: FSDPEngine, folder_of: Folder, tmp_path: Path
) -> None:
    train(engine)
    write_adapter(engine.adapter_weights(), tmp_path / "adapter", "", write=True)
    path = str(tmp_path / "adapter")
    again = make_engine(folder_of("experts"), **LORA, lora_adapter_path=path)
    assert worst(arrays(again.weights()), arrays(engine.weights())) < 1e-6


def test_experts_are_adapted_where_they_are_named(folder_of: Folder) -> None:
    engine = make_engine(folder_of("experts"), lora_rank=RANK)
    assert not any("experts" in name for name in engine.adapter.parameters())
    there = r"no linear map .*called so.\n  it has:  experts, k_proj"
    for target in ("gate_proj", "experts.up_proj"):
        with pytest.raises(ConfigError, match=there):
            make_engine(folder_of("experts"), lora_rank=RANK, target_modules=[target])
    with pytest.raises(ConfigError, match="names experts, and no linear map"):
        make_engine(folder_of("qwen2"), lora_rank=RANK, target_modules=["experts"])


def test_rollouts_get_experts_with_the_updates_added() -> None:
    (engine,) = (backend for backend in coupler_backends() if backend.kind == "engine")
    assert "weights:lora" in engine.capabilities_of(FSDPConfig(lora_rank=RANK))
    adapted = engine.capabilities_of(FSDPConfig(**LORA))
    assert "weights:lora" not in adapted and "output:base_logprobs" in adapted
