"""Engines take over from each other: checkpoints with the optimizer, and adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coupler.batch import Batch
from coupler.interfaces import Part
from coupler.testing.cases import make_batch, weighted
from coupler.testing.models import write_qwen2, write_qwen3_moe
from coupler.testing.ranks import Arrays, World
from coupler.testing.reference import TransformersReference

SURROGATE = "coupler.testing.losses:surrogate"
ENGINES = {
    "fsdp": ("coupler_engine_fsdp.engine:FSDPEngine", "coupler_engine_fsdp.config:FSDPConfig"),
    "megatron": (
        "coupler_engine_megatron.engine:MegatronEngine",
        "coupler_engine_megatron.config:MegatronConfig",
    ),
}
# (engine, ranks, settings)
FSDP2 = ("fsdp", 2, {})
TENSOR2 = ("megatron", 2, {"tensor_parallel": 2})
EXPERT2 = ("megatron", 2, {"expert_parallel": 2})
MOE2 = ("megatron", 2, {"tensor_parallel": 2, "expert_parallel": 2})
SPLIT2 = ("megatron", 2, {"tensor_parallel": 2, "expert_tensor_parallel": 2})
LORA = {"lora_rank": 4, "lora_alpha": 8.0}
MIXTURE = {**LORA, "target_modules": ["all-linear", "experts"]}
CASES = {
    "dense": ("dense", FSDP2, TENSOR2, {}),
    "tied": ("tied", FSDP2, TENSOR2, {}),
    "experts": ("moe", FSDP2, EXPERT2, {}),
    "adapter": ("dense", FSDP2, TENSOR2, LORA),
    "adapter of experts": ("moe", FSDP2, MOE2, MIXTURE),
}
SAVED = (Part.PARAMS, Part.OPTIMIZER)

Start = Callable[..., World]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TransformersReference]:
    def write(name: str) -> TransformersReference:
        folder = tmp_path_factory.mktemp("model") / name
        if name == "moe":
            return TransformersReference(write_qwen3_moe(folder))
        return TransformersReference(write_qwen2(folder, tied=name == "tied"))

    return write


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[World] = []

    def make(layout: tuple[str, int, dict[str, Any]], folder: Path, **more: object) -> World:
        engine, ranks, settings = layout
        target, config = ENGINES[engine]
        recipe = {
            "target": target,
            "config": config,
            # With a small epsilon AdamW magnifies the last bits of a gradient near 0.
            "settings": {"lr": 1e-2, "eps": 1e-4, "max_tokens_per_gpu": 64, **settings, **more},
            "model": str(folder),
            "head": "lm",
        }
        place = tmp_path / f"world-{len(made)}"
        place.mkdir()
        made.append(World(recipe, ranks, place))
        return made[-1]

    yield make
    for world in made:
        world.close()


def step(world: World, batch: Batch, index: int) -> tuple[float, Arrays]:
    """Take a step. Return the norm of its gradient, and the gradient."""
    parts = [batch.take(rows) for rows in batch.partition(world.layout.num_shards)]
    gradient, _, steps = world.gradient(parts, SURROGATE, index=index)
    return steps[0][1], gradient


def assert_near(got: Arrays, want: Arrays, near: float) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        np.testing.assert_allclose(got[name], tensor, atol=near, rtol=0, err_msg=name)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("back", [False, True])
def test_one_engine_goes_on_where_the_other_saved(
    case: str,
    back: bool,
    model: Callable[[str], TransformersReference],
    start: Start,
    tmp_path: Path,
) -> None:
    """The next step is that of the run that went on. What comes back is equal to the
    bit.
    """
    name, one, other, settings = CASES[case]
    if back:
        one, other = other, one
    reference = model(name)
    batches = [weighted(make_batch(reference, seed=seed)) for seed in range(3)]
    folders = [tmp_path / f"saved-{i}" for i in range(2)]
    for folder in folders:
        folder.mkdir()

    first = start(one, reference.folder, **settings)
    for index in range(2):
        step(first, batches[index], index)
    first.save(folders[0], *SAVED)
    before = first.weights()

    second = start(other, reference.folder, **settings)
    second.load(folders[0], *SAVED)
    # With an adapter, weights are a sum that each engine takes in its own order.
    assert_near(second.weights(), before, 1e-7 if settings else 0)
    second.save(folders[1], *SAVED)
    again = start(one, reference.folder, **settings)
    again.load(folders[1], *SAVED)
    assert_near(again.weights(), before, 0)

    worlds = first, second, again
    norms = [step(world, batches[2], 2)[0] for world in worlds]
    weights = [world.weights() for world in worlds]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5) and norms[2] == norms[0]
    assert_near(weights[1], weights[0], 1e-5)
    assert_near(weights[2], weights[0], 0)


@pytest.mark.parametrize("other", [TENSOR2, MOE2, SPLIT2])
def test_engines_train_one_adapter(
    other: tuple[str, int, dict[str, Any]],
    model: Callable[[str], TransformersReference],
    start: Start,
) -> None:
    """The same seed and batches give the same gradients, and A and B after three
    steps.
    """
    dense = other is TENSOR2
    reference = model("dense" if dense else "moe")
    batches = [weighted(make_batch(reference, seed=seed)) for seed in range(3)]
    found = []
    for layout in (FSDP2, other):
        world = start(layout, reference.folder, eps=1e-2, **(LORA if dense else MIXTURE))
        for index, batch in enumerate(batches):
            gradient = step(world, batch, index)[1]
        found.append((gradient, world.adapter_weights()))
    for got, want in zip(found[1], found[0], strict=True):
        assert_near(got, want, 1e-5)
