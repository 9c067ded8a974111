"""Adapters on GPUs, with Transformer Engine's attention: bf16 against transformers in
float64, of linear maps and of experts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from adapters import MIXTURE, adapted, adapter, merged, of_pairs, write
from families import References, Start, references, shards
from gpu import CONFIGS, ON_GPU, Rounded, closeness, on_gpus

from coupler.batch import Batch
from coupler.interfaces import EVERYTHING, Model, Output, Part, Rank, StepInfo
from coupler.testing import losses
from coupler.testing.cases import make_batch, weighted
from coupler.testing.ranks import Arrays, World, as_array
from coupler.testing.reference import TransformersReference
from coupler_engine_megatron.config import MegatronConfig
from coupler_engine_megatron.engine import MegatronEngine

pytestmark = ON_GPU
RANK = 6
"""No multiple of 8, to which grouped products on a GPU need it filled up."""
WANT = (Output("logprobs"), Output("entropy"))
ONE = {"lora_rank": RANK, "lora_alpha": 2.0 * RANK}
LAYOUTS = {  # (model, GPUs, settings)
    "qwen2": ("qwen2", 1, {}),
    "qwen3": ("qwen3", 1, {}),
    "beside-experts": ("moe", 1, {}),
    "experts": ("moe", 1, MIXTURE),
    "tp2": ("qwen3", 2, {"tensor_parallel": 2}),
    "tp2-biases": ("qwen2", 2, {"tensor_parallel": 2}),
    "tp2-shared-head": ("shared-head", 2, {"tensor_parallel": 2}),
    "pp2": ("qwen3", 2, {"pipeline_parallel": 2}),
    "experts-ep2": ("moe", 2, {"expert_parallel": 2, **MIXTURE}),
    "experts-tp2-ep2": ("moe", 2, {"tensor_parallel": 2, "expert_parallel": 2, **MIXTURE}),
    "experts-tp2-etp2": ("moe", 2, {"tensor_parallel": 2, "expert_tensor_parallel": 2, **MIXTURE}),
    "experts-tp2-whole": ("moe", 2, {"tensor_parallel": 2, **MIXTURE}),
}


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> References:
    return references(CONFIGS, tmp_path_factory)


@pytest.fixture
def start(start: Start) -> Start:
    return on_gpus(start)


def routed(batch: Batch, reference: TransformersReference) -> Batch:
    """Send both sides to the same experts, if there are some: in bf16 a router may
    choose another where two are close.
    """
    has = any(".experts." in name for name in reference.tensors)
    return batch.with_tokens(routed_experts=reference.routes(batch)) if has else batch


def assert_outputs(
    world: World, batch: Batch, truths: dict[str, tuple[TransformersReference, Rounded]]
) -> None:
    """Hold log-probs with and without the adapter against what bf16 costs transformers
    on the merged weights. The update is rounded by itself.
    """
    parts = shards(batch, world)
    done = world.forward(parts, tuple(truths))
    for output, (exact, rounded) in truths.items():
        wants = [exact.outputs(part)["logprobs"] for part in parts]
        error = np.concatenate([np.abs(d[output] - w) for d, w in zip(done, wants, strict=True)])
        limit = np.concatenate(
            [np.abs(rounded.outputs(p)["logprobs"] - w) for p, w in zip(parts, wants, strict=True)]
        )
        assert error.sum() <= 1.5 * limit.sum(), (
            f"{output}: {error.mean():.4f}, of transformers {limit.mean():.4f}"
        )


def assert_exports(world: World, truth: TransformersReference, pairs: Arrays) -> None:
    """The weights have the update added, and the adapter's are bf16 of the file's."""
    found = world.adapter_weights()
    assert found.keys() == pairs.keys()
    for name, tensor in pairs.items():
        exact = torch.from_numpy(tensor).bfloat16().float().numpy()
        np.testing.assert_array_equal(found[name], exact, err_msg=name)

    weights = world.weights()
    for name, tensor in truth.tensors.items():
        apart = np.abs(weights[name] - tensor).max() / np.abs(tensor).max()
        assert apart < 2**-7, f"{name}: {apart:.5f}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_adapter_computes_as_merged_weights_do(
    layout: str, reference_of: References, start: Start, tmp_path: Path
) -> None:
    name, ranks, settings = LAYOUTS[layout]
    reference = reference_of(name)
    targets = settings.get("target_modules", ["all-linear"])
    pairs = adapter(reference, adapted(reference, targets), RANK)
    write(pairs, tmp_path / "peft")
    truth = merged(reference, pairs, 1.0, tmp_path / "merged")
    batch = routed(weighted(make_batch(truth)), truth)
    world = start(
        reference.folder, ranks, lora_adapter_path=str(tmp_path / "peft"), **ONE, **settings
    )

    rounded = Rounded(truth)
    assert_exports(world, truth, pairs)
    both = {"logprobs": (truth, rounded), "base_logprobs": (reference, Rounded(reference))}
    assert_outputs(world, batch, both)

    grads, _, steps = world.gradient(
        shards(batch, world), "coupler.testing.losses:nll", ("logprobs",)
    )
    exact, other = (
        of_pairs(each.gradient(batch, losses.nll).grads, pairs, 2.0) for each in (truth, rounded)
    )
    assert grads.keys() == exact.keys()
    angle, limit = (1 - closeness(each, exact) for each in (grads, other))
    assert angle <= 1.5 * limit, f"1 - cosine: {angle:.5f}, of transformers {limit:.5f}"
    norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in exact.values()))
    assert steps[0][1] == pytest.approx(norm, rel=0.1)
    assert all(step == steps[0] for step in steps)


def started(reference: TransformersReference, rank: Rank, **settings: object) -> MegatronEngine:
    config = MegatronConfig(lr=1e-3, lora_rank=RANK, **settings)  # type: ignore[arg-type]
    engine = MegatronEngine(config, Model(str(reference.folder)))
    engine.setup(rank)
    return engine


def train(engine: MegatronEngine, batch: Batch, index: int) -> Arrays:
    """Take a step, and return its gradient."""
    engine.forward_backward(batch, WANT, losses.surrogate, StepInfo(batch.num_tokens, index))
    found = {name: as_array(tensor) for name, tensor in engine.gradients()}
    assert engine.step().applied
    return found


@pytest.mark.parametrize("name", ["qwen3", "moe"])
def test_a_step_in_bf16_is_near_one_in_fp32(name: str, reference_of: References) -> None:
    """B is 0 at first, so that what moves is what the step trained."""
    reference, found = reference_of(name), {}
    batch = routed(weighted(make_batch(reference)), reference)
    settings = MIXTURE if name == "moe" else {}
    for dtype in ("fp32", "bf16"):
        engine = started(reference, Rank(), dtype=dtype, **settings)
        before = engine.forward(batch, WANT[:1])["logprobs"]
        train(engine, batch, 0)
        found[dtype] = engine.forward(batch, WANT[:1])["logprobs"]
        moved = np.abs(found[dtype] - before).mean()
        engine.close()
    assert np.abs(found["bf16"] - found["fp32"]).mean() < 0.3 * moved


@pytest.mark.parametrize("lora", [True, False])
def test_an_expert_without_tokens_has_no_gradient(lora: bool, reference_of: References) -> None:
    reference = reference_of("moe")
    batch = weighted(make_batch(reference))
    routes = np.resize(np.array([2, 5], np.int16), reference.routes(batch).shape)
    batch = batch.with_tokens(routed_experts=routes)
    if lora:
        engine = started(reference, Rank(), **MIXTURE)
        train(engine, batch, 0)  # Each A has a gradient once its B is not 0.
    else:
        engine = MegatronEngine(MegatronConfig(lr=1e-2), Model(str(reference.folder)))
        engine.setup(Rank())
    grads = train(engine, batch, 1)
    of_experts = {name: grad for name, grad in grads.items() if ".mlp.experts." in name}
    assert of_experts
    for name, grad in of_experts.items():
        used = int(name.partition(".experts.")[2].partition(".")[0]) in (2, 5)
        assert np.isfinite(grad).all() and grad.any() == used, name


def test_activations_computed_again_change_no_gradient(reference_of: References) -> None:
    reference = reference_of("moe")
    batch = routed(weighted(make_batch(reference)), reference)
    found = []
    for settings in (
        {"gradient_checkpointing": "none"},
        {"gradient_checkpointing": "full"},
        {
            "gradient_checkpointing": "selective",
            "recompute_modules": ["core_attn", "layernorm", "moe_act"],
        },
    ):
        engine = started(reference, Rank(), **MIXTURE, **settings)
        train(engine, batch, 0)
        found.append(train(engine, batch, 1))
    for other in found[1:]:
        assert closeness(other, found[0]) > 1 - 1e-4


@pytest.mark.parametrize("name", ["qwen3", "moe"])
def test_an_engine_with_adapters_leaves_the_device_and_comes_back(
    name: str, reference_of: References, deterministic: Rank
) -> None:
    """Frozen experts of a layer are in one storage."""
    reference = reference_of(name)
    batch = routed(weighted(make_batch(reference)), reference)
    settings = MIXTURE if name == "moe" else {}
    engine, still = (started(reference, deterministic, **settings) for _ in range(2))
    for each in (engine, still):
        train(each, batch, 0)
    for part in Part:
        held = torch.cuda.memory_allocated()
        engine.offload(frozenset({part}))
        assert torch.cuda.memory_allocated() < held, part
        engine.onload(frozenset({part}))
        assert torch.cuda.memory_allocated() == held

    for index in (1, 2):  # The second time, frozen weights are on the host already.
        engine.offload(EVERYTHING)
        engine.onload(EVERYTHING)
        for each in (engine, still):
            train(each, batch, index)
    want = {name: as_array(tensor) for name, tensor in still.weights()}
    for tensor, value in engine.weights():
        np.testing.assert_array_equal(as_array(value), want[tensor], err_msg=tensor)


def test_a_resumed_adapter_goes_on_to_the_bit(
    reference_of: References, tmp_path: Path, deterministic: Rank
) -> None:
    reference = reference_of("moe")
    batch = routed(weighted(make_batch(reference)), reference)
    engine, resumed = (started(reference, deterministic, **MIXTURE) for _ in range(2))
    train(engine, batch, 0)
    saved = frozenset({Part.PARAMS, Part.OPTIMIZER})
    engine.save(tmp_path, saved).wait(60)
    resumed.load(tmp_path, saved)
    for each in (engine, resumed):
        train(each, batch, 1)
    want = {name: as_array(tensor) for name, tensor in engine.adapter_weights()}
    for name, tensor in resumed.adapter_weights():
        np.testing.assert_array_equal(as_array(tensor), want[name], err_msg=name)
