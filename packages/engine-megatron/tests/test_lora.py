"""LoRA in every layout: the gradient against transformers in float64, what is sent, and
what is frozen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import MIXTURE, RANK, adapted, adapter, merged, of_pairs, write
from families import References, Start, shards

from coupler.errors import ConfigError
from coupler.interfaces import Model, Output, Rank, StepInfo
from coupler.testing import losses
from coupler.testing.cases import make_batch, weighted
from coupler.testing.conformance.test_engine import assert_gradient
from coupler.testing.reference import Gradient
from coupler_engine_megatron.config import MegatronConfig
from coupler_engine_megatron.engine import MegatronEngine
from coupler_engine_megatron.experts import GroupedLinear
from coupler_engine_megatron.plugin import coupler_backends

LOGPROBS, ENTROPY = Output("logprobs"), Output("entropy")
SURROGATE = "coupler.testing.losses:surrogate"
LAYOUTS = {  # (model, ranks, settings)
    "one": ("llama", 1, {}),
    "tensor": ("llama", 2, {"tensor_parallel": 2}),
    "tensor-without-sequence": (
        "qwen3",
        2,
        {"tensor_parallel": 2, "sequence_parallel": False, "gradient_checkpointing": "none"},
    ),
    "shared-key-value-head": ("odd-sizes", 2, {"tensor_parallel": 2}),
    "context": ("qwen3", 2, {"context_parallel": 2}),
    "data": ("llama", 2, {}),
    "virtual-pipeline": ("qwen3", 2, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "tensor-pipeline": ("llama", 4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "some-targets": (
        "llama",
        2,
        {"tensor_parallel": 2, "target_modules": ["q_proj", "v_proj", "up_proj", "o_proj"]},
    ),
    "beside-experts": ("moe", 2, {"tensor_parallel": 2, "expert_parallel": 2}),
    "experts": ("moe", 1, MIXTURE),
    "experts-tensor": ("moe", 2, {"tensor_parallel": 2, **MIXTURE}),
    "experts-expert": ("moe", 2, {"expert_parallel": 2, **MIXTURE}),
    "experts-tensor-expert": ("moe", 2, {"tensor_parallel": 2, "expert_parallel": 2, **MIXTURE}),
    "experts-split": ("moe", 2, {"tensor_parallel": 2, "expert_tensor_parallel": 2, **MIXTURE}),
    "experts-overlap": (
        "moe",
        2,
        {"tensor_parallel": 2, "expert_tensor_parallel": 2, "overlap_grad_reduce": True, **MIXTURE},
    ),
    "experts-virtual-pipeline": (
        "moe",
        4,
        {"pipeline_parallel": 2, "virtual_pipeline": 2, "expert_parallel": 2, **MIXTURE},
    ),
    "experts-of-one-stage": (
        "moe",
        2,
        {"pipeline_parallel": 2, "target_modules": ["q_proj", "3.mlp.experts"]},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_no_gradient_of_an_adapter(
    layout: str, reference_of: References, start: Start, tmp_path: Path
) -> None:
    """With W + s B A for W: dB = s dW A^T and dA = s B^T dW, from a PEFT folder."""
    name, ranks, settings = LAYOUTS[layout]
    reference = reference_of(name)
    targets = settings.get("target_modules", ["all-linear"])
    pairs = adapter(reference, adapted(reference, targets))
    # The file's scale is 1, and the engine's is 2.
    write(pairs, tmp_path / "peft")
    truth = merged(reference, pairs, 1.0, tmp_path / "merged")
    batch = weighted(make_batch(truth))

    world = start(
        reference.folder,
        ranks,
        lora_rank=RANK,
        lora_alpha=2.0 * RANK,
        lora_adapter_path=str(tmp_path / "peft"),
        **settings,
    )
    for part, tensor in world.adapter_weights().items():
        np.testing.assert_allclose(tensor, pairs[part], atol=1e-6, err_msg=part)
    for part, tensor in world.weights().items():
        np.testing.assert_allclose(tensor, truth.tensors[part], atol=1e-6, err_msg=part)
    done = world.forward(shards(batch, world), ("logprobs", "base_logprobs"))
    for shard, outputs in zip(shards(batch, world), done, strict=True):
        for output, of in (("logprobs", truth), ("base_logprobs", reference)):
            np.testing.assert_allclose(
                outputs[output], of.outputs(shard)["logprobs"], atol=5e-5, rtol=1e-4
            )

    got, _, steps = world.gradient(shards(batch, world), SURROGATE)
    dense = truth.gradient(batch, losses.surrogate)
    # The engine's B is half of the file's, and its scale twice as large.
    want = of_pairs(dense.grads, pairs, 2.0)
    expected = Gradient(want, dense.metrics, dense.tolerance)
    assert_gradient(got, expected)
    assert all(step == steps[0] for step in steps)
    assert steps[0][1] == pytest.approx(expected.norm, rel=1e-4)


def parameter_bytes(engine: MegatronEngine) -> dict[str, int]:
    """Bytes of parameters and of their fp32 masters, by dtype."""
    held = [p for chunk in engine.chunks for p in chunk.parameters()]
    if engine._optimizer is not None:
        for part in engine._optimizer.parts:
            held += [t for group in part.shard_fp32_from_float16_groups for t in group]
    found: dict[str, int] = {}
    for tensor in {t.data_ptr(): t for t in held}.values():
        found[str(tensor.dtype)] = found.get(str(tensor.dtype), 0) + tensor.nbytes
    return found


@pytest.mark.parametrize(
    ("name", "lora"), [("llama", True), ("llama", False), ("moe", True), ("moe", False)]
)
def test_what_does_not_train_takes_two_bytes_a_parameter(
    name: str, lora: bool, reference_of: References
) -> None:
    """A reference has no optimizer, and LoRA has masters of the adapter alone."""
    reference = reference_of(name)
    targets = ["all-linear", "experts"] if name == "moe" else ["all-linear"]
    settings = {"lora_rank": RANK, "target_modules": targets} if lora else {}
    config = MegatronConfig(dtype="bf16", **settings)
    engine = MegatronEngine(config, Model(str(reference.folder), frozen=not lora))
    engine.setup(Rank())
    model = sum(tensor.size for tensor in reference.tensors.values())
    pairs = adapter(reference, adapted(reference, targets)) if lora else {}
    trained = sum(tensor.size for tensor in pairs.values())

    assert parameter_bytes(engine) == {"torch.bfloat16": 2 * (model + trained)}
    if lora:
        engine._trained()
        assert parameter_bytes(engine) == {
            "torch.bfloat16": 2 * (model + trained),
            "torch.float32": 4 * trained,
        }


def test_a_model_with_latent_attention_is_refused(reference_of: References) -> None:
    engine = MegatronEngine(
        MegatronConfig(lora_rank=RANK), Model(str(reference_of("latent").folder))
    )
    with pytest.raises(ConfigError, match="adapts no latent attention") as raised:
        engine.setup(Rank())
    assert "engine=fsdp" in str(raised.value)


def test_a_target_that_is_not_there_is_named(reference_of: References) -> None:
    config = MegatronConfig(lora_rank=RANK, target_modules=["q_proj", "c_attn"])
    engine = MegatronEngine(config, Model(str(reference_of("llama").folder)))
    with pytest.raises(ConfigError, match="target_modules names c_attn") as raised:
        engine.setup(Rank())
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in str(raised.value)


@pytest.mark.parametrize("target", ["gate_proj", "experts.0.up_proj"])
def test_experts_are_adapted_together_where_they_are_named(
    target: str, reference_of: References
) -> None:
    config = MegatronConfig(lora_rank=RANK, target_modules=[target])
    engine = MegatronEngine(config, Model(str(reference_of("moe").folder)))
    with pytest.raises(ConfigError, match=f"target_modules names {target}") as raised:
        engine.setup(Rank())
    assert "it has:  experts, k_proj, o_proj, q_proj, v_proj" in str(raised.value)


def test_experts_in_bf16_are_near_those_in_fp32(reference_of: References) -> None:
    """B is 0 at first, so that what moves is what a step trained."""
    reference, found = reference_of("moe"), {}
    batch = weighted(make_batch(reference))
    for dtype in ("fp32", "bf16"):
        config = MegatronConfig(dtype=dtype, lora_rank=6, lr=1e-2, target_modules=["experts"])
        engine = MegatronEngine(config, Model(str(reference.folder)))
        engine.setup(Rank())
        before = engine.forward(batch, (LOGPROBS,))["logprobs"]
        info = StepInfo(batch.num_tokens, 0)
        engine.forward_backward(batch, (LOGPROBS, ENTROPY), losses.surrogate, info)
        assert engine.step().applied
        found[dtype] = engine.forward(batch, (LOGPROBS,))["logprobs"]
        assert np.abs(found[dtype] - before).mean() > 0.3
        engine.close()
    assert np.abs(found["bf16"] - found["fp32"]).mean() < 0.1


@pytest.mark.parametrize("rank", [1, 3, 6, 8])
def test_grouped_products_of_any_rank_are_aligned_as_a_gpu_needs_it(
    rank: int, reference_of: References
) -> None:
    """PyTorch holds bf16 without data against the strides that its kernels take."""
    config = MegatronConfig(dtype="bf16", lora_rank=rank, target_modules=["experts"])
    engine = MegatronEngine(config, Model(str(reference_of("moe").folder)))
    engine.setup(Rank())
    found: list[Any] = [m for m in engine.chunks[0].modules() if isinstance(m, GroupedLinear)]
    for module in found:
        update = module.update.__self__
        update.rows = update.rows.to("meta")
        for parameter in module.to("meta").parameters():
            parameter.tensor_model_parallel = True
        tokens = torch.zeros(7, module.weight0.shape[1], dtype=torch.bfloat16, device="meta")
        output, _ = module(tokens.requires_grad_(), [3, 0, 4, 0])
        output.square().sum().backward()
        assert module.lora_A0.grad.shape == module.lora_A0.shape
        assert module.lora_B0.grad.shape == module.lora_B0.shape
    assert len(found) == 8
    engine.close()


def test_rollouts_get_experts_with_the_updates_added() -> None:
    (engine,) = coupler_backends()
    linears, experts = (
        engine.capabilities_of(MegatronConfig(lora_rank=RANK, target_modules=targets))
        for targets in (["all-linear"], ["all-linear", "experts"])
    )
    assert linears - experts == {"weights:lora"} and experts < linears
    assert {"lora:experts", "output:base_logprobs"} < experts
