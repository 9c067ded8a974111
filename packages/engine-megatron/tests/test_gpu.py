"""On GPUs, with Transformer Engine: bf16 against transformers in float64, for every
layout that they have ranks for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from families import References, Start, references
from gpu import CONFIGS, ON_GPU, Rounded, closeness, on_gpus

from coupler.batch import Batch
from coupler.interfaces import EVERYTHING, Model, Output, Part, Rank, StepInfo
from coupler.testing import losses
from coupler.testing.cases import make_batch, weighted
from coupler.testing.ranks import World, as_array
from coupler.testing.reference import TransformersReference
from coupler_engine_megatron.config import MegatronConfig
from coupler_engine_megatron.engine import MegatronEngine

pytestmark = ON_GPU
LAYOUTS = {  # (model, GPUs, settings)
    "tp2": ("qwen3", 2, {"tensor_parallel": 2}),
    "tp2-shared-head": ("shared-head", 2, {"tensor_parallel": 2}),
    "pp2": ("qwen2", 2, {"pipeline_parallel": 2}),
    "pp2-uneven": ("llama", 2, {"pipeline_parallel": 2, "first_stage_layers": 1}),
    "pp2-vpp2": ("llama", 2, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "cp2": ("llama", 2, {"context_parallel": 2}),
    "dp2": ("qwen3", 2, {}),
    "ep2": ("moe", 2, {"expert_parallel": 2}),
    "tp2-etp2": ("moe", 2, {"tensor_parallel": 2, "expert_tensor_parallel": 2}),
    "latent-tp2-ep2": ("latent", 2, {"tensor_parallel": 2, "expert_parallel": 2}),
    "tp2-whole-experts": ("moe", 2, {"tensor_parallel": 2}),
    "tp2-pp2": ("qwen3", 4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "tp2-cp2": ("llama", 4, {"tensor_parallel": 2, "context_parallel": 2}),
    "tp2-ep2-pp2": ("moe", 4, {"tensor_parallel": 2, "expert_parallel": 2, "pipeline_parallel": 2}),
}
SURROGATE = "coupler.testing.losses:surrogate"
KIT = (
    "logprobs_and_entropy or (gradient_over_shards and even) or weights_are_the_checkpoint "
    "or adamw or routing"
)
WANT = (Output("logprobs"), Output("entropy"))


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> References:
    return references(CONFIGS, tmp_path_factory)


@pytest.fixture
def start(start: Start) -> Start:
    return on_gpus(start)


def assert_routes(world: World, parts: list[Batch], reference: TransformersReference) -> None:
    """Its own routes give equal bits; disturbed ones other log-probs, and the routers
    keep a gradient.
    """
    both = ("logprobs", "routed_experts")
    done = world.forward(parts, both)
    own = [
        p.with_tokens(routed_experts=d["routed_experts"]) for p, d in zip(parts, done, strict=True)
    ]
    for first, again in zip(done, world.forward(own, both), strict=True):
        for name in both:
            np.testing.assert_array_equal(again[name], first[name], err_msg=name)
    number = reference.model.config.num_local_experts
    other = [
        p.with_tokens(routed_experts=((p["routed_experts"] + 1) % number).astype(np.int16))
        for p in own
    ]
    for first, again in zip(done, world.forward(other, both), strict=True):
        assert np.abs(again["logprobs"] - first["logprobs"]).max() > 0.01
    grads, metrics, _ = world.gradient(other, SURROGATE)
    routers = [name for name in grads if name.endswith("mlp.gate.weight")]
    assert len(routers) == own[0]["routed_experts"].shape[1] and all(
        grads[name].any() for name in routers
    )
    assert metrics["moe/route_disagreement"].value > 0.9


def assert_close(world: World, reference: TransformersReference) -> None:
    """With experts, both sides are sent to the same ones: in bf16 a router may choose
    another where two are close.
    """
    batch = weighted(make_batch(reference))
    if any(".experts." in name for name in reference.tensors):
        assert_routes(
            world,
            [batch.take(rows) for rows in batch.partition(world.layout.num_shards)],
            reference,
        )
        batch = batch.with_tokens(routed_experts=reference.routes(batch))
    parts = [batch.take(rows) for rows in batch.partition(world.layout.num_shards)]
    done = world.forward(parts, ("logprobs", "entropy"))
    rounded = Rounded(reference)
    for name in ("logprobs", "entropy"):
        wants = [reference.outputs(part)[name] for part in parts]
        error = np.concatenate([np.abs(d[name] - w) for d, w in zip(done, wants, strict=True)])
        limit = np.concatenate(
            [np.abs(rounded.outputs(p)[name] - w) for p, w in zip(parts, wants, strict=True)]
        )
        assert error.sum() <= 1.5 * limit.sum(), (
            f"{name}: {error.mean():.4f}, of transformers {limit.mean():.4f}"
        )
    weights = world.weights()
    for name, tensor in reference.tensors.items():
        # of a router, which is exported in fp32
        rounds = not name.endswith("correction_bias")
        exact = torch.from_numpy(tensor).bfloat16().float().numpy() if rounds else tensor
        np.testing.assert_array_equal(weights[name], exact, err_msg=name)
    grads, _, steps = world.gradient(
        parts, "coupler.testing.losses:nll", ("logprobs",)
    )  # smooth: nothing is clipped
    want, other = (each.gradient(batch, losses.nll) for each in (reference, rounded))
    angle, of_rounded = (1 - closeness(each, want.grads) for each in (grads, other.grads))
    assert angle <= 1.5 * of_rounded, f"1 - cosine: {angle:.5f}, of transformers {of_rounded:.5f}"
    assert steps[0][1] == pytest.approx(want.norm, rel=0.1)
    assert all(step == steps[0] for step in steps)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_on_one_gpu(
    name: str, reference_of: Callable[[str], TransformersReference], start: Callable[..., World]
) -> None:
    assert_close(start(reference_of(name).folder, 1), reference_of(name))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_on_several_gpus(
    layout: str, reference_of: Callable[[str], TransformersReference], start: Callable[..., World]
) -> None:
    name, ranks, settings = LAYOUTS[layout]
    assert_close(start(reference_of(name).folder, ranks, **settings), reference_of(name))


def train(engine: MegatronEngine, reference: TransformersReference, index: int) -> None:
    batch = weighted(make_batch(reference, seed=index))
    engine.forward_backward(batch, WANT, losses.surrogate, StepInfo(batch.num_tokens, index))
    engine.step()


def started(reference: TransformersReference) -> MegatronEngine:
    engine = MegatronEngine(MegatronConfig(lr=1e-3), Model(str(reference.folder)))
    engine.setup(Rank())
    return engine


def test_offloaded_memory_is_free_and_comes_back(
    reference_of: Callable[[str], TransformersReference],
) -> None:
    reference = reference_of("qwen3")
    engine, still = started(reference), started(reference)
    for each in (engine, still):
        train(each, reference, 0)
    for part in Part:
        tensors = [each for held, _ in engine._held(part).values() for each in held]
        held = torch.cuda.memory_allocated()
        engine.offload(frozenset({part}))
        freed = held - torch.cuda.memory_allocated()
        unique = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        assert unique == {0} and freed > 0, part
        engine.onload(frozenset({part}))
        assert torch.cuda.memory_allocated() == held
    engine.offload(EVERYTHING)
    engine.onload(EVERYTHING)
    for each in (engine, still):
        train(each, reference, 1)
    want = {name: as_array(tensor) for name, tensor in still.weights()}
    for name, tensor in engine.weights():
        np.testing.assert_array_equal(as_array(tensor), want[name], err_msg=name)


def test_a_resumed_engine_goes_on_to_the_bit(
    reference_of: Callable[[str], TransformersReference], tmp_path: Path
) -> None:
    """With fp32 master weights behind weights of bf16."""
    reference = reference_of("llama")
    engine, resumed = started(reference), started(reference)
    train(engine, reference, 0)
    engine.save(tmp_path, frozenset({Part.PARAMS, Part.OPTIMIZER})).wait(60)
    resumed.load(tmp_path, frozenset({Part.PARAMS, Part.OPTIMIZER}))
    for each in (engine, resumed):
        train(each, reference, 1)
    want = {name: as_array(tensor) for name, tensor in engine.weights()}
    for name, tensor in resumed.weights():
        np.testing.assert_array_equal(as_array(tensor), want[name], err_msg=name)


def test_activations_of_experts_computed_again_change_no_gradient(
    reference_of: Callable[[str], TransformersReference],
) -> None:
    """Their memory is given back while the grouped product still holds on to it."""
    reference, found = reference_of("moe"), []
    batch = weighted(make_batch(reference))
    batch = batch.with_tokens(routed_experts=reference.routes(batch))
    for settings in (
        {"gradient_checkpointing": "none"},
        {"gradient_checkpointing": "selective", "recompute_modules": ["moe_act"]},
    ):
        engine = MegatronEngine(MegatronConfig(lr=1e-3, **settings), Model(str(reference.folder)))  # type: ignore[arg-type]
        engine.setup(Rank())
        engine.forward_backward(batch, WANT, losses.surrogate, StepInfo(batch.num_tokens, 0))
        found.append({name: as_array(tensor) for name, tensor in engine.gradients()})
    assert closeness(*found) > 1 - 1e-5


@pytest.mark.parametrize("name", ["llama", "moe"])
def test_a_deterministic_engine_repeats_itself_to_the_bit(
    name: str, reference_of: Callable[[str], TransformersReference], deterministic: Rank
) -> None:
    reference, found = reference_of(name), []
    for _ in range(2):
        engine = MegatronEngine(MegatronConfig(lr=1e-3), Model(str(reference.folder)))
        engine.setup(deterministic)
        for index in range(2):
            train(engine, reference, index)
        found.append({name: as_array(tensor) for name, tensor in engine.weights()})
    for tensor, want in found[0].items():
        np.testing.assert_array_equal(found[1][tensor], want, err_msg=tensor)


def test_a_batch_is_one_row_without_padding(
    reference_of: Callable[[str], TransformersReference],
) -> None:
    engine = started(reference_of("llama"))
    batch: Batch = make_batch(reference_of("llama"))
    assert engine._pack(batch).tokens.shape == (1, batch.num_tokens)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("untied", ["tensor_parallel=2"]),
        ("untied", ["pipeline_parallel=2"]),
        ("moe", ["expert_parallel=2", "tensor_parallel=2"]),
    ],
    ids=["tp2", "pp2", "tp2-ep2"],
)
def test_the_kit_in_fp32(model: str, settings: list[str], tmp_path: Path) -> None:
    """Transformer Engine's layers, with products that are not rounded to TF32, hold to
    twice the kit's own bound.

    Measured: 1.08e-5, whatever the layout, the micro-batches and the order.
    """
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path}",
    ]
    command += [
        "--pyargs",
        "coupler.testing.conformance",
        "--coupler",
        "engine=megatron",
        "--coupler-model",
        model,
    ]
    command += ["-k", KIT, "--coupler-gradient", "2e-5"]
    for setting in ("dtype=fp32", *settings):
        command += ["--coupler-set", f"engine.{setting}"]
    quiet = {**os.environ, "NVIDIA_TF32_OVERRIDE": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1200, check=False, env=quiet
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
