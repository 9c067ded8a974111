"""Check engines that train low-rank updates (LoRA, arXiv 2106.09685): what training
starts from, the gradient in closed form, the model beneath, and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coupler.engine_kit.lora import ALL, EXPERTS, LoRAConfig
from coupler.engine_kit.lora_names import names_of, start_of, weight_of
from coupler.interfaces import Part
from coupler.testing import expect, losses
from coupler.testing.cases import make_batch, weighted
from coupler.testing.conformance.conftest import FROZEN
from coupler.testing.conformance.test_engine import (
    LOGPROBS,
    SURROGATE,
    assert_gradient,
    split,
)
from coupler.testing.models import rewrite
from coupler.testing.ranks import Arrays, World
from coupler.testing.reference import Gradient, Reference, TransformersReference
from coupler.testing.subject import Subject

RANK, SCALE = 4, 2.0
PLAIN = {"lora_rank": RANK, "lora_alpha": RANK * SCALE}

Worlds = Callable[..., World]
Settings = dict[str, Any]


@pytest.fixture(autouse=True)
def adapts(engine_subject: Subject) -> None:
    """Skip an engine that has no option for an adapter."""
    if not issubclass(engine_subject.backend.config, LoRAConfig):
        pytest.skip(f"{engine_subject} has no coupler.engine_kit.lora.LoRAConfig")


@pytest.fixture
def lora(engine_subject: Subject, reference: Reference) -> Settings:
    """Return the options of an adapter of all linear maps, and of experts if the engine
    adapts them.
    """
    mixture = any(".experts." in name for name in reference.tensors)
    experts = [EXPERTS] if mixture and engine_subject.has("lora:experts") else []
    return {**PLAIN, "target_modules": [ALL, *experts]}


def sums(reference: Reference, adapter: Arrays) -> Arrays:
    """Return the weights of the folder with an adapter added."""
    tensors = {name: np.array(tensor, np.float32) for name, tensor in reference.tensors.items()}
    for name in tensors:
        a, b = names_of(name)
        if a in adapter:
            tensors[name] += adapter[b] @ adapter[a]
    return tensors


@pytest.mark.parametrize("num_shards", [1, 2])
def test_training_starts_from_the_model(
    fresh: Worlds, reference: Reference, lora: Settings, num_shards: int
) -> None:
    """B is 0 and A is drawn by the weight's name, equal on any number of ranks."""
    world = fresh(reference.folder, num_shards, **lora)
    for name, tensor in world.weights().items():
        np.testing.assert_array_equal(tensor, reference.tensors[name], err_msg=name)

    adapter = world.adapter_weights()
    weights = {weight for name in adapter if (weight := weight_of(name))}
    expect.holds(len(adapter) == 2 * len(weights) > 0, "A and B of every weight", sorted(adapter))
    for weight in weights:
        a, b = names_of(weight)
        drawn = start_of(weight, RANK, reference.tensors[weight].shape[1], 0)
        np.testing.assert_array_equal(adapter[a], drawn, err_msg=a)
        expect.holds(not adapter[b].any(), f"{b} to be 0 at the start")


@pytest.mark.parametrize("num_shards", [1, 2])
def test_the_gradient_follows_from_that_of_the_weights(
    fresh: Worlds, reference: Reference, lora: Settings, tmp_path: Path, num_shards: int
) -> None:
    """With W + s B A for W: dB = s dW A^T, and dA = s B^T dW, here after a step."""
    world = fresh(reference.folder, num_shards, **lora)
    first, batch = (weighted(make_batch(reference, seed=seed)) for seed in (1, 2))
    world.gradient(split(first, world), SURROGATE)
    adapter, merged = world.adapter_weights(), world.weights()
    for name, tensor in sums(reference, adapter).items():
        np.testing.assert_allclose(merged[name], tensor, atol=1e-6, err_msg=name)

    truth = TransformersReference(rewrite(reference.folder, tmp_path / "merged", merged))
    truth.tolerance = reference.tolerance
    dense = truth.gradient(batch, losses.surrogate)
    want: Arrays = {}
    for weight in filter(None, map(weight_of, adapter)):
        a, b = names_of(weight)
        # adapter[b] holds the scale already.
        want[a] = adapter[b].T @ dense.grads[weight]
        want[b] = SCALE * dense.grads[weight] @ adapter[a].T

    got, _, steps = world.gradient(split(batch, world), SURROGATE, index=1)
    expected = Gradient(want, dense.metrics, dense.tolerance)
    assert_gradient(got, expected)
    expect.near(steps[0][1], expected.norm, "the norm of the gradient", rel=1e-4)


def test_without_the_adapter_it_is_the_model(
    fresh: Worlds, reference: Reference, lora: Settings
) -> None:
    """base_logprobs are those of the folder, whatever was trained."""
    world = fresh(reference.folder, **lora)
    batch = weighted(make_batch(reference))
    world.gradient([batch], SURROGATE)
    (done,) = world.forward([batch], ("logprobs", "base_logprobs"))
    want = reference.outputs(batch)["logprobs"]
    np.testing.assert_allclose(done["base_logprobs"], want, atol=LOGPROBS, rtol=1e-4)
    moved = float(np.abs(done["logprobs"] - done["base_logprobs"]).max())
    expect.holds(moved > 100 * LOGPROBS, "log-probs to move in a step", moved)


def test_chosen_targets_alone_are_trained(fresh: Worlds, reference: Reference) -> None:
    """Every other weight stays, also one that an engine fuses with a chosen one."""
    # A model of experts alone has no other up_proj, and experts are not chosen so.
    dense = any(".mlp.up_proj." in name for name in reference.tensors)
    targets = ["q_proj", "up_proj"] if dense else ["q_proj"]
    world = fresh(reference.folder, **PLAIN, target_modules=targets)
    grads, _, _ = world.gradient([weighted(make_batch(reference))], SURROGATE)
    ends = tuple(f".{target}.weight" for target in targets)
    chosen = {name for name in reference.tensors if name.endswith(ends)}
    names = {part for weight in chosen for part in names_of(weight)}
    expect.same(set(grads), names, "the names that gradients() yields")
    expect.same(set(world.adapter_weights()), names, "the names that adapter_weights() yields")

    moved = {
        name
        for name, tensor in world.weights().items()
        if not np.array_equal(tensor, reference.tensors[name])
    }
    expect.same(moved, chosen, "the weights that a step changes")


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_saved_adapter_continues_as_if_nothing_had_happened(
    fresh: Worlds, reference: Reference, lora: Settings, tmp_path: Path, num_shards: int
) -> None:
    first, second = (weighted(make_batch(reference, seed=seed)) for seed in (1, 2))
    world = fresh(reference.folder, num_shards, deterministic=True, **lora)  # bits are compared
    world.gradient(split(first, world), SURROGATE)
    world.save(tmp_path, Part.PARAMS, Part.OPTIMIZER)
    world.gradient(split(second, world), SURROGATE, index=1)

    resumed = fresh(reference.folder, num_shards, deterministic=True, **lora)
    resumed.load(tmp_path, Part.PARAMS, Part.OPTIMIZER)
    resumed.gradient(split(second, resumed), SURROGATE, index=1)
    got = resumed.weights()
    for name, tensor in world.weights().items():
        np.testing.assert_array_equal(got[name], tensor, err_msg=name)


def test_a_step_that_changes_nothing_changes_no_weight(
    fresh: Worlds, reference: Reference, lora: Settings
) -> None:
    """Weights beneath are exact, also where weights and updates are added."""
    world = fresh(reference.folder, **lora, lr=FROZEN)
    world.gradient([weighted(make_batch(reference))], SURROGATE)
    for name, tensor in world.weights().items():
        np.testing.assert_array_equal(tensor, reference.tensors[name], err_msg=name)
