"""Options that trade time for memory, or hide it: each does what its name says, and
none changes a result.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import References, Start, shards
from ranks import Arrays, on_ranks

from coupler.errors import ConfigError
from coupler.interfaces import Model, Output, Rank, StepInfo
from coupler.testing import losses
from coupler.testing.cases import make_batch, weighted
from coupler.testing.conformance.test_engine import assert_gradient
from coupler.testing.ranks import as_array
from coupler.testing.reference import TransformersReference
from coupler_engine_megatron.config import MegatronConfig
from coupler_engine_megatron.engine import MegatronEngine

WANT = (Output("logprobs"), Output("entropy"))
SURROGATE = "coupler.testing.losses:surrogate"
LAYERS = 4


def started(folder: Path, rank: Rank = Rank(), **settings: Any) -> MegatronEngine:  # noqa: B008  # frozen
    engine = MegatronEngine(MegatronConfig(**settings), Model(str(folder)))
    engine.setup(rank)
    return engine


def calls(
    engine: MegatronEngine, reference: TransformersReference
) -> tuple[list[int], dict[str, int]]:
    """How often each layer, and each part of the first one, is computed in one step of
    one micro-batch.
    """
    counts: Counter[str] = Counter()
    for name, module in engine.chunks[0].named_modules():
        module.register_forward_hook(lambda *_, name=name: counts.update([name]))
    batch = weighted(make_batch(reference))
    engine.forward_backward(batch, WANT, losses.surrogate, StepInfo(batch.num_tokens, 0))
    inside = "decoder.layers.0."
    parts = {
        name.removeprefix(inside): number
        for name, number in counts.items()
        if name.startswith(inside)
    }
    return [counts[f"decoder.layers.{i}"] for i in range(LAYERS)], parts


@pytest.mark.parametrize(
    ("settings", "layers", "parts"),
    [
        ({}, [2, 2, 2, 2], {}),
        ({"recompute_num_layers": 2}, [2, 2, 2, 2], {}),
        ({"recompute_method": "block", "recompute_num_layers": 3}, [2, 2, 2, 1], {}),
        (
            {"gradient_checkpointing": "none"},
            [1, 1, 1, 1],
            {"self_attention.core_attention": 1, "mlp": 1},
        ),
        (
            {"gradient_checkpointing": "selective"},
            [1, 1, 1, 1],
            {"self_attention.core_attention": 2, "mlp": 1, "input_layernorm": 1},
        ),
        (
            {"gradient_checkpointing": "selective", "recompute_modules": ["mlp"]},
            [1, 1, 1, 1],
            {"self_attention.core_attention": 1, "mlp": 2, "input_layernorm": 1},
        ),
    ],
    ids=["full", "groups", "block", "none", "attention", "mlp"],
)
def test_what_is_computed_again(
    settings: dict[str, Any], layers: list[int], parts: dict[str, int], reference_of: References
) -> None:
    reference = reference_of("llama")
    engine = started(reference.folder, **settings)
    found, inside = calls(engine, reference)
    assert found == layers
    assert {name: inside[name] for name in parts} == parts
    grads = {name: as_array(tensor) for name, tensor in engine.gradients()}
    assert_gradient(grads, reference.gradient(weighted(make_batch(reference)), losses.surrogate))


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"recompute_num_layers": 0}, "recompute_num_layers must be at least 1"),
        (
            {"gradient_checkpointing": "none", "recompute_num_layers": 2},
            "recompute_num_layers needs engine.gradient",
        ),
        (
            {"gradient_checkpointing": "none", "recompute_method": "block"},
            "recompute_method needs engine.gradient",
        ),
        (
            {"gradient_checkpointing": "auto", "recompute_num_layers": 2},
            "recompute_num_layers needs engine.gradient_checkpointing=full",
        ),
        (
            {"gradient_checkpointing": "selective", "recompute_modules": ["moe"]},
            "recompute_modules must name some of",
        ),
        (
            {"recompute_modules": ["mlp"]},
            "recompute_modules needs engine.gradient_checkpointing=selective",
        ),
        (
            {"overlap_param_gather": True},
            "overlap_param_gather needs engine.overlap_grad_reduce=true",
        ),
        ({"lora_rank": -1}, "lora_rank must not be negative"),
        ({"target_modules": ["q_proj"]}, "target_modules needs engine.lora_rank above 0"),
        ({"moe_aux_loss_coeff": -1.0}, "moe_aux_loss_coeff must not be negative"),
        ({"sync_bucket_mib": 0}, "sync_bucket_mib must be above 0"),
    ],
)
def test_what_would_have_no_effect_is_refused(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        MegatronConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"recompute_num_layers": 3}, "does not divide the 4 layers"),
        ({"recompute_method": "block", "recompute_num_layers": 5}, "is more than the 4 layers"),
        (
            {"gradient_checkpointing": "selective", "recompute_modules": ["moe_act"]},
            "names moe_act, which only",
        ),
    ],
)
def test_what_the_model_does_not_allow_is_refused(
    settings: dict[str, Any], what: str, reference_of: References
) -> None:
    with pytest.raises(ConfigError, match=what):
        started(reference_of("llama").folder, **settings)


def overlapped(rank: Rank, model: str) -> Arrays:
    """What DDP is told, and how many collectives of gradients ran before all of the
    backward pass was done.
    """
    reference = TransformersReference(Path(model))
    engine = started(
        reference.folder, rank, overlap_grad_reduce=True, overlap_param_gather=True, lr=1e-2
    )
    batch = weighted(make_batch(reference))
    shard = batch.take(batch.partition(rank.world)[rank.index])
    info = StepInfo(batch.num_tokens, 0)
    engine.forward_backward(shard, WANT, losses.surrogate, info)
    before = {name: as_array(tensor) for name, tensor in engine.weights()}
    engine.step()
    params = engine.chunks[0].buffers[0].param_data
    late = params.clone()  # this rank's part is new, the other's is not
    after = {name: as_array(tensor) for name, tensor in engine.weights()}
    options = engine.chunks[0].ddp_config
    return {
        "told": np.array([options.overlap_grad_reduce, options.overlap_param_gather]),
        "waits": np.array(bool((late != params).any())),
        "moved": np.array(all((after[name] != before[name]).any() for name in before)),
        "some": after["model.layers.0.mlp.up_proj.weight"],
    }


def test_weights_are_gathered_when_they_are_needed(
    reference_of: References, tmp_path: Path
) -> None:
    one, two = on_ranks(
        "test_memory_options:overlapped", 2, tmp_path, model=str(reference_of("llama").folder)
    )
    for found in (one, two):
        assert found["told"].all() and found["waits"] and found["moved"]
    np.testing.assert_array_equal(one["some"], two["some"])


def test_overlap_changes_no_step(reference_of: References, start: Start) -> None:
    reference = reference_of("llama")
    worlds = [
        start(reference.folder, 2, lr=1e-2, overlap_grad_reduce=on, overlap_param_gather=on)
        for on in (False, True)
    ]
    for index in range(3):
        batch = weighted(make_batch(reference, seed=index))
        for world in worlds:
            world.gradient(shards(batch, world), SURROGATE, index=index)
    plain, overlap = (world.weights() for world in worlds)
    for name, tensor in plain.items():
        np.testing.assert_array_equal(overlap[name], tensor, err_msg=name)


def told(rank: Rank, model: str) -> Arrays:
    """What a deterministic rank sets, and two gradients of equal engines."""
    grads = []
    for _ in range(2):
        engine = started(Path(model), replace(rank, deterministic=True))
        calls(engine, TransformersReference(Path(model)))
        grads.append(as_array(next(iter(engine.gradients()))[1]))
    told = torch.are_deterministic_algorithms_enabled(), engine.transformer.deterministic_mode
    return {
        "told": np.array([*told, os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"]),
        "grads": np.stack(grads),
    }


def test_a_deterministic_rank_chooses_kernels_that_are(
    reference_of: References, tmp_path: Path
) -> None:
    (found,) = on_ranks(
        "test_memory_options:told", 1, tmp_path, model=str(reference_of("llama").folder)
    )
    assert found["told"].all()
    np.testing.assert_array_equal(*found["grads"])


def exported(rank: Rank, model: str) -> Arrays:
    """The export in buckets of several sizes against one tensor at a time, and the
    number of collectives.
    """
    from coupler_engine_megatron import weights

    settings: dict[str, Any] = (
        {"tensor_parallel": 2} if rank.world == 2 else {"tensor_parallel": 2, "expert_parallel": 2}
    )
    engine = started(Path(model), rank, pipeline_parallel=rank.world // 2, **settings)
    sizes: dict[int, list[int]] = {
        1: [],
        20_000: [],
        2**30: [],
    }  # of what each collective brought together
    genuine, whole = weights._gather, []
    for limit, taken in sizes.items():
        engine.catalogue.bucket_bytes = limit
        engine.catalogue.buckets.clear()

        def noted(tensors: Any, group: Any, taken: list[int] = taken) -> Any:
            taken.append(sum(tensor.nbytes for tensor in tensors) * group.size())
            return genuine(tensors, group)

        weights._gather = noted
        whole.append({name: as_array(tensor) for name, tensor in engine.weights()})
        weights._gather = genuine
        assert max(taken) <= max(limit, *sizes[1])
        whole.append(
            {name: as_array(tensor) for name, tensor in engine.weights()}
        )  # where tensors lie is known now
    for found in whole:
        assert list(found) == list(whole[0])
        for name, tensor in whole[0].items():
            np.testing.assert_array_equal(found[name], tensor, err_msg=name)
    return {"counts": np.array([len(taken) for taken in sizes.values()]), **whole[0]}


@pytest.mark.parametrize(("name", "ranks"), [("qwen3", 2), ("moe", 4)])
def test_an_export_in_buckets_is_the_checkpoint(
    name: str, ranks: int, reference_of: References, tmp_path: Path
) -> None:
    """The same bits with fewer collectives, and never more than a bucket of memory for
    one.
    """
    reference = reference_of(name)
    for found in on_ranks(
        "test_memory_options:exported", ranks, tmp_path, model=str(reference.folder)
    ):
        many, some, few = found.pop("counts")
        assert many > some > few
        for tensor, want in reference.tensors.items():
            np.testing.assert_array_equal(found[tensor], want, err_msg=tensor)
