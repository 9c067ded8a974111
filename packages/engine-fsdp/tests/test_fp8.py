"""Matrix products in fp8, emulated on the CPU."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    CONFIGS,
    SHAPE,
    WANT,
    arrays,
    info,
    loss,
    make_batch,
    make_engine,
    reference,
    without_torchao,
    worst,
    write_model,
)
from torch import nn
from transformers import Qwen2Config, Qwen2MoeConfig, Qwen3Config

from coupler import RunConfig
from coupler.errors import ConfigError
from coupler.interfaces import EVERYTHING, Head, Model, Output, Rank
from coupler.testing import cases
from coupler.testing.cases import weighted
from coupler.testing.ranks import World
from coupler.testing.reference import TransformersReference
from coupler_engine_fsdp import fp8
from coupler_engine_fsdp.config import FSDPConfig
from coupler_engine_fsdp.engine import FSDPEngine
from coupler_engine_fsdp.plugin import coupler_validate

float8 = pytest.importorskip("torchao.float8")
Folder = Callable[[str], Path]
RECIPES = ["rowwise_with_gw_hp", "rowwise", "tensorwise"]
FP8: dict[str, Any] = {"precision": "fp8", "lr": 1e-2, "max_tokens_per_gpu": 64}
HALF = 2**-4
"""e4m3 has 3 bits of mantissa, so that rounding moves a number by this part at most."""
STEP = 2**-3 / 12**0.5 / 1.47
"""The mean square root of that error: a step over the root of 12, over the same of a
number between powers of two.
"""


def converted(engine: FSDPEngine) -> list[str]:
    modules = engine.policy.causal.named_modules()
    return [
        name for name, module in modules if isinstance(module, float8.float8_linear.Float8Linear)
    ]


def cosine(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> float:
    a, b = (np.concatenate([g[n].ravel() for n in want]).astype(np.float64) for g in (got, want))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model whose layers add to the residual stream as those of trained models
    do. Those of the other tests add so much that roundings grow.
    """
    config = {**CONFIGS["blocks"].to_dict(), "initializer_range": 0.05}
    return write_model(tmp_path_factory.mktemp("calm"), Qwen3Config(**config))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_product_is_as_exact_as_its_operands(folder_of: Folder, recipe: str) -> None:
    """Each term of a sum is a product of two rounded numbers. Numbers below 2**-6 have
    a fixed step of 2**-9, and the scale puts the largest at 224 at least.
    """
    engine = make_engine(folder_of("blocks"), dtype="fp32", fp8_recipe=recipe, **FP8)
    linear: Any = engine.policy.causal.get_submodule(converted(engine)[0])
    x = torch.randn(37, linear.in_features, generator=torch.Generator().manual_seed(0))
    weight = linear.weight.detach()
    with torch.no_grad():
        got = linear(x)

    sizes = x.abs() @ weight.abs().T
    small = (
        2**-10 / 224 * (x.abs().max() * weight.abs().sum(1) + weight.abs().max() * x.abs().sum())
    )
    off = (got - x @ weight.T).abs()
    assert (off <= (2 * HALF + HALF**2) * sizes + small).all()
    assert off.max() > 1e-3, "the product was not rounded"


@pytest.mark.parametrize("recipe", RECIPES)
def test_log_probs_and_gradient_are_near_those_of_fp32(calm: Path, recipe: str) -> None:
    """Rounding to 3 bits moves a number by STEP of its size on average, and a product
    of two by sqrt(2) as much. On the way to a logit each layer has five such products.
    """
    batch = make_batch()
    mask = batch["loss_mask"]
    outputs, grads = reference(calm)
    engine = make_engine(calm, dtype="fp32", fp8_recipe=recipe, **FP8)
    assert len(converted(engine)) == 14

    off = engine.forward(batch, WANT)["logprobs"][mask] - outputs["logprobs"][mask]
    bound = 2**0.5 * STEP * (5 * 2) ** 0.5 * outputs["logprobs"][mask].std()
    assert 0.1 * bound < np.sqrt((off**2).mean()) < bound
    assert np.abs(off).max() < 4 * bound
    engine.forward_backward(batch, WANT, loss, info(batch))
    # Tensorwise rounds gradients to 2 bits of mantissa.
    least = 0.98 if recipe == "tensorwise" else 0.99
    assert least < cosine(arrays(engine.gradients()), grads) < 0.9999


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_training_and_log_probs_have_the_same_products(calm: Path, dtype: str) -> None:
    batch = make_batch()
    engine = make_engine(calm, dtype=dtype, **FP8)
    trained: list[np.ndarray] = []

    def keep(out: Any, columns: Any) -> Any:
        mask = columns["loss_mask"]
        trained.append(out["logprobs"].detach()[mask].float().numpy())
        return loss(out, columns)

    computed = engine.forward(batch, WANT)["logprobs"]
    engine.forward_backward(batch, WANT, keep, info(batch))
    order = np.concatenate(engine._micro_batches(batch))
    want = batch.with_tokens(want=computed).take(order)
    np.testing.assert_array_equal(np.concatenate(trained), want["want"][want["loss_mask"]])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "bf16"},
        {"dtype": "bf16", "offload_optimizer": True},
        {"fp8_recipe": "rowwise"},
        {"fp8_recipe": "tensorwise"},
        {"optimizer": "muon"},
        {"optimizer": "adamw8bit", "dtype": "bf16"},
    ],
    ids=lambda settings: ", ".join(map(str, settings.values())) or "default",
)
def test_the_loss_falls_as_without(calm: Path, settings: dict[str, Any]) -> None:
    plain = {key: value for key, value in settings.items() if key != "fp8_recipe"}
    with_fp8 = curve(make_engine(calm, **{**FP8, "lr": 3e-3, **settings}))
    without = curve(make_engine(calm, **{"lr": 3e-3, "max_tokens_per_gpu": 64, **plain}))
    fall = without[0] - without[-1]
    assert fall > 0.5, "the loss does not fall without fp8"
    assert np.abs(np.subtract(with_fp8, without)).max() < 0.1 * fall


def curve(engine: FSDPEngine, steps: int = 20) -> list[float]:
    """Return the mean of -log p of one batch before each step."""
    batch = make_batch()
    found: list[float] = []

    def surprise(out: Any, columns: Any) -> Any:
        return -out["logprobs"], {}

    for index in range(steps):
        logprobs = engine.forward(batch, (Output("logprobs"),))["logprobs"]
        found.append(-float(logprobs[batch["loss_mask"]].mean()))
        engine.forward_backward(batch, (Output("logprobs"),), surprise, info(batch, index))
        assert engine.step().applied
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_keep_their_names_and_their_masters(
    folder_of: Folder, tmp_path: Path, dtype: str
) -> None:
    """A run goes on from a checkpoint with the other products, either way."""
    folder = folder_of("blocks")
    settings = {"dtype": dtype, "sync_dtype": "fp32"}
    plain, rounded = make_engine(folder, **settings), make_engine(folder, **settings, **FP8)
    want, got = arrays(plain.weights()), arrays(rounded.weights())
    assert list(got) == list(want)
    assert all(np.array_equal(got[name], want[name]) for name in want)

    curve(rounded, 2)
    rounded.save(tmp_path, EVERYTHING).wait(60)
    plain.load(tmp_path, EVERYTHING)
    want, got = arrays(rounded.weights()), arrays(plain.weights())
    assert all(np.array_equal(got[name], want[name]) for name in want)
    assert all(tensor.dtype == torch.float32 for tensor in rounded.named.values())


@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputing_changes_no_number(folder_of: Folder, recipe: str) -> None:
    batch, found = make_batch(), []
    for checkpointing in (False, True):
        engine = make_engine(
            folder_of("blocks"), fp8_recipe=recipe, gradient_checkpointing=checkpointing, **FP8
        )
        engine.forward_backward(batch, WANT, loss, info(batch))
        found.append(arrays(engine.gradients()))
    assert worst(*found) == 0


def test_micro_batches_change_no_result(folder_of: Folder) -> None:
    """One scale of a whole tensor depends on the tokens beside one's own. No sequences
    here share a prompt.
    """
    batch, off = make_batch().take(range(2, 10)), {}
    for recipe in RECIPES:
        outputs, grads = [], []
        for limit in (30, 1000):
            settings = {**FP8, "max_tokens_per_gpu": limit, "fp8_recipe": recipe}
            engine = make_engine(folder_of("blocks"), dtype="fp32", **settings)
            outputs.append(engine.forward(batch, WANT)["logprobs"])
            engine.forward_backward(batch, WANT, loss, info(batch))
            grads.append(arrays(engine.gradients()))
        off[recipe] = np.abs(outputs[0] - outputs[1]).max(), worst(*grads)

    assert max(off["rowwise_with_gw_hp"]) < 1e-5
    assert off["rowwise"][0] < 1e-5
    assert min(off["tensorwise"]) > 0.01


def test_a_shared_prompt_has_one_rounding_of_its_gradients(folder_of: Folder) -> None:
    """Where it is computed once, gradients of its tokens are summed before they are
    rounded. It changes less than the roundings themselves do.
    """
    batch, found, outputs = make_batch().take([0, 1, 2]), [], []
    for limit in (30, 1000):
        settings = {**FP8, "max_tokens_per_gpu": limit}
        engine = make_engine(folder_of("blocks"), dtype="fp32", **settings)
        outputs.append(engine.forward(batch, WANT)["logprobs"])
        engine.forward_backward(batch, WANT, loss, info(batch))
        found.append(arrays(engine.gradients()))
    np.testing.assert_allclose(outputs[0], outputs[1], atol=1e-5)
    assert 0.99 < cosine(*found) < 1 - 1e-9


@pytest.mark.parametrize(
    "settings",
    [{}, {"reshard_after_forward": False}, {"sequence_parallel": 2, "max_tokens_per_gpu": 8}],
    ids=["sharded", "kept", "sequence"],
)
def test_ranks_have_the_gradient_of_one(
    folder_of: Folder, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """All have the same micro-batches. A number at the edge of a rounding may fall to
    the other side.
    """
    batch = weighted(cases.make_batch(TransformersReference(folder_of("blocks"))))
    found = []
    for count, more in ((1, {}), (2, settings)):
        place = tmp_path / str(count)
        place.mkdir()
        engine = {
            "target": "coupler_engine_fsdp.engine:FSDPEngine",
            "config": "coupler_engine_fsdp.config:FSDPConfig",
            "settings": {"precision": "fp8", "dtype": "fp32", "max_tokens_per_gpu": 16, **more},
            "model": str(folder_of("blocks")),
            "head": "lm",
        }
        world = World(engine, count, place)
        shards = [batch.take(rows) for rows in batch.partition(world.layout.num_shards)]
        found.append(world.gradient(shards, "coupler.testing.losses:surrogate")[0])
        world.close()
    assert worst(found[1], found[0]) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", "inductor"])
def test_a_compiled_layer_has_the_same_products(
    backend: str, folder_of: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first backend goes up to the code that the second writes and compiles."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    batch, outputs, grads = make_batch(), [], []
    for compiled in (False, True):
        engine = make_engine(folder_of("blocks"), dtype="fp32", compile=compiled, **FP8)
        outputs.append(engine.forward(batch, WANT)["logprobs"])
        engine.forward_backward(batch, WANT, loss, info(batch))
        grads.append(arrays(engine.gradients()))
    np.testing.assert_allclose(outputs[1], outputs[0], atol=1e-4)
    assert worst(*grads) < 1e-3


def test_what_keeps_its_products(tmp_path: Path) -> None:
    """Embeddings, head, router, experts, and a gate of one output."""
    shape = {**CONFIGS["blocks"].to_dict(), "num_experts": 16, "num_experts_per_tok": 2}
    shape |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
    names = ("model_type", "architectures", "layer_types", "head_dim")
    config = Qwen2MoeConfig(**{key: value for key, value in shape.items() if key not in names})
    engine = make_engine(write_model(tmp_path, config), **FP8)

    attention = {f"self_attn.{name}_proj" for name in "qkvo"}
    mlp = {f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
    found = {name.removeprefix("model.layers.0.") for name in converted(engine)[:7]}
    assert found == attention | mlp and len(converted(engine)) == 14
    losses = curve(engine, 5)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["router", "gate", "block.router.first"])
def test_a_router_of_linear_maps_keeps_its_products(name: str) -> None:
    assert not fp8._fits(name, nn.Linear(64, 16))
    assert fp8._fits("mlp.gate_proj", nn.Linear(64, 16))


def test_a_critic_and_a_reference_have_them_too(calm: Path) -> None:
    engine = FSDPEngine(FSDPConfig(**FP8), Model(str(calm), head=Head.VALUE))
    engine.setup(Rank())
    assert len(converted(engine)) == 14
    frozen = make_engine(calm, frozen=True, dtype="bf16", **FP8)
    trained = make_engine(calm, dtype="bf16", **FP8)
    batch = make_batch()
    got, want = (one.forward(batch, WANT)["logprobs"] for one in (frozen, trained))
    np.testing.assert_array_equal(got, want)


def test_a_rollout_may_differ_by_what_fp8_rounds() -> None:
    assert (FSDPConfig().rounds_to, FSDPConfig(**FP8).rounds_to) == ("", "float8_e4m3fn")


def test_an_adapter_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("engine.precision needs engine.lora_rank=0")):
        FSDPConfig(precision="fp8", lora_rank=8)


def test_scales_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("engine.fp8_recipe needs engine.precision=fp8")):
        FSDPConfig(fp8_recipe="tensorwise")


def test_a_missing_library_is_one_sentence(
    folder_of: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig()
    config.engine = FSDPConfig(precision="fp8")
    assert not list(coupler_validate(config))

    without_torchao(monkeypatch)
    assert list(coupler_validate(config)) == [
        "engine.precision=fp8 needs torchao: pip install 'coupler-engine-fsdp[fp8]'."
    ]
    with pytest.raises(ConfigError, match="precision=fp8 needs torchao"):
        make_engine(folder_of("blocks"), **FP8)


def test_a_model_of_odd_sides_is_refused(tmp_path: Path) -> None:
    shape = {"hidden_size": 40, "intermediate_size": 72, "num_attention_heads": 4}
    config = Qwen2Config(**{**SHAPE, **shape}, tie_word_embeddings=False, max_window_layers=2)
    with pytest.raises(ConfigError, match=r"finds no linear map.*multiple of 16"):
        make_engine(write_model(tmp_path, config), **FP8)


def test_a_gpu_without_these_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    device = torch.device("cuda")
    with pytest.raises(ConfigError, match=r"capability 8\.9 or later, and this one has 8\.0"):
        fp8.has_kernels(FSDPConfig(precision="fp8"), device)
    assert fp8.has_kernels(FSDPConfig(), device), "nothing is asked for"
