"""Families and layouts beyond the kit's, against transformers in float64; and what
setup refuses.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from families import CONFIGS, LLAMA3, YARN, References, Start, shards, without
from torch import nn

from coupler.errors import CouplerError
from coupler.interfaces import Head, Model, Part, Rank
from coupler.testing import losses
from coupler.testing.cases import RAGGED, make_batch, weighted
from coupler.testing.conformance.test_engine import assert_gradient
from coupler.testing.models import read_tensors, rewrite
from coupler.testing.ranks import RankFailed
from coupler_engine_megatron.bridge import mark_whole
from coupler_engine_megatron.config import MegatronConfig
from coupler_engine_megatron.engine import MegatronEngine

LAYOUTS = {  # (model, ranks, settings)
    "virtual-pipeline": ("llama", 2, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "virtual-pipeline-tied": (
        "qwen3",
        4,
        {"tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2},
    ),
    "pipeline-tied-uneven": (
        "qwen3",
        3,
        {"pipeline_parallel": 3, "first_stage_layers": 1, "last_stage_layers": 1},
    ),
    "experts-over-data": ("moe", 2, {"expert_parallel": 2}),
    "experts-over-data-4": ("moe", 4, {"expert_parallel": 4}),
    "experts-over-context": ("moe", 2, {"expert_parallel": 2, "context_parallel": 2}),
    "experts-virtual-pipeline": (
        "moe",
        4,
        {"expert_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2},
    ),
    "experts-whole-on-tensor-ranks": ("moe", 2, {"tensor_parallel": 2}),
    "latent-experts": ("latent-yarn", 2, {"expert_parallel": 2}),
    "latent-tensor": ("latent-yarn", 2, {"tensor_parallel": 2, "expert_parallel": 2}),
    "latent-context": ("latent-yarn", 2, {"context_parallel": 2}),
    "latent-pipeline": ("latent-yarn", 4, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "no-sequence-parallel": ("qwen3", 2, {"tensor_parallel": 2, "sequence_parallel": False}),
    "padded-vocabulary-shared-key-value-head": ("odd-sizes", 2, {"tensor_parallel": 2}),
    "experts-and-their-matrices": (
        "moe",
        4,
        {"tensor_parallel": 2, "expert_tensor_parallel": 2, "expert_parallel": 2},
    ),
    "context-pipeline": ("qwen3", 4, {"pipeline_parallel": 2, "context_parallel": 2}),
    "context-tensor": ("qwen3", 4, {"tensor_parallel": 2, "context_parallel": 2}),
    "selective": ("llama", 1, {"gradient_checkpointing": "selective"}),
    "groups-of-layers": ("llama", 1, {"recompute_num_layers": 2}),
    "first-layers": ("llama", 1, {"recompute_method": "block", "recompute_num_layers": 3}),
    "overlap": ("llama", 2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "overlap-experts": (
        "moe",
        2,
        {"expert_parallel": 2, "overlap_grad_reduce": True, "max_tokens_per_gpu": 14},
    ),
    "overlap-pipeline": (
        "qwen3",
        4,
        {
            "pipeline_parallel": 2,
            "virtual_pipeline": 2,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
    ),
    "nothing-again": ("llama", 1, {"gradient_checkpointing": "none"}),
    "small-tiles": ("llama", 1, {"logits_tile": 128}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_equals_transformers(name: str, reference_of: References, start: Start) -> None:
    """Log-probs, gradient, and weights to the bit."""
    reference = reference_of(name)
    batch = weighted(make_batch(reference, RAGGED))
    world = start(reference.folder)
    for tensor, want in reference.tensors.items():
        np.testing.assert_array_equal(world.weights()[tensor], want, err_msg=tensor)
    got = world.forward([batch], ("logprobs",))[0]["logprobs"]
    np.testing.assert_allclose(got, reference.outputs(batch)["logprobs"], atol=5e-5, rtol=1e-4)
    grads, _, _ = world.gradient([batch], "coupler.testing.losses:surrogate")
    assert_gradient(grads, reference.gradient(batch, losses.surrogate))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_no_gradient(layout: str, reference_of: References, start: Start) -> None:
    name, ranks, settings = LAYOUTS[layout]
    reference = reference_of(name)
    batch = weighted(make_batch(reference))
    world = start(reference.folder, ranks, **settings)
    grads, _, steps = world.gradient(shards(batch, world), "coupler.testing.losses:surrogate")
    want = reference.gradient(batch, losses.surrogate)
    assert_gradient(grads, want)
    assert all(step == steps[0] for step in steps)
    assert steps[0][1] == pytest.approx(want.norm, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("qwen3", (4, {"tensor_parallel": 2, "pipeline_parallel": 2}), (1, {})),
        ("qwen3", (4, {"tensor_parallel": 2, "pipeline_parallel": 2}), (4, {})),
        (
            "qwen3",
            (1, {}),
            (4, {"pipeline_parallel": 2, "virtual_pipeline": 2, "tensor_parallel": 2}),
        ),
        (
            "moe",
            (4, {"expert_parallel": 2, "pipeline_parallel": 2, "last_stage_layers": 1}),
            (2, {"tensor_parallel": 2}),
        ),
    ],
    ids=["tp2-pp2-to-1", "tp2-pp2-to-dp4", "1-to-tp2-pp2-vpp2", "ep2-pp2-to-tp2"],
)
def test_a_checkpoint_is_read_in_another_layout(
    name: str,
    before: tuple[int, dict[str, object]],
    after: tuple[int, dict[str, object]],
    reference_of: References,
    start: Start,
    tmp_path: Path,
) -> None:
    """Equal weights to the bit, equal log-probs, and the next step moves them alike."""
    reference = reference_of(name)
    first, second = (weighted(make_batch(reference, seed=seed)) for seed in (1, 2))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    old, new = (start(reference.folder, ranks, **settings) for ranks, settings in (before, after))
    old.gradient(shards(first, old), "coupler.testing.losses:surrogate")
    old.save(folder, Part.PARAMS, Part.OPTIMIZER)
    new.load(folder, Part.PARAMS, Part.OPTIMIZER)
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    saved, read = old.weights(), new.weights()
    for tensor, want in saved.items():
        np.testing.assert_array_equal(read[tensor], want, err_msg=tensor)
    for world in (old, new):
        world.gradient(shards(second, world), "coupler.testing.losses:surrogate", index=1)
    moved, got = old.weights(), new.weights()
    for tensor, want in moved.items():
        assert np.abs(got[tensor] - want).max() <= 1e-2 * np.abs(want - saved[tensor]).max(), tensor


def test_weights_alone_are_loaded_before_and_after_training(
    reference_of: References, start: Start, tmp_path: Path
) -> None:
    """A reference has no optimizer; one that trains goes on from the loaded weights,
    not from its master copies.
    """
    reference = reference_of("llama")
    batch = weighted(make_batch(reference))
    source, plain, trained = (start(reference.folder) for _ in range(3))
    for world in (source, source, trained):
        world.gradient([batch], "coupler.testing.losses:surrogate")
    source.save(tmp_path, Part.PARAMS)
    want = source.weights()
    for world in (plain, trained):
        world.load(tmp_path, Part.PARAMS)
        for tensor, value in world.weights().items():
            np.testing.assert_array_equal(value, want[tensor], err_msg=tensor)
    trained.gradient([batch], "coupler.testing.losses:surrogate")
    for tensor, value in trained.weights().items():
        # two steps of lr at most
        assert np.abs(value - want[tensor]).max() <= 3e-3, tensor


def test_the_cpu_is_cuda_only_inside_of_a_call(reference_of: References, start: Start) -> None:
    """Nothing that stands in for CUDA is left behind where another backend of the
    process would meet it.
    """
    import torch

    names = (
        "current_device",
        "device_count",
        "Stream",
        "get_rng_state",
        "FloatTensor",
        "default_generators",
    )
    before = [getattr(torch.cuda, name) for name in names] + [
        torch.Tensor.cuda,
        torch.nn.Module.cuda,
    ]
    reference = reference_of("llama")
    world = start(reference.folder)
    world.gradient([weighted(make_batch(reference))], "coupler.testing.losses:surrogate")
    assert [getattr(torch.cuda, name) for name in names] + [
        torch.Tensor.cuda,
        torch.nn.Module.cuda,
    ] == before
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


# --- what is refused


def refusal(folder: Path, head: Head = Head.LM, **settings: object) -> str:
    with pytest.raises(CouplerError) as error:
        MegatronEngine(MegatronConfig(**settings), Model(str(folder), head=head)).setup(Rank())
    return str(error.value)


def changed(folder: Path, target: Path, **values: object) -> Path:
    """The same model with other values in its config.json."""
    rewrite(folder, target, read_tensors(folder))
    config = {**json.loads((folder / "config.json").read_text()), **values}
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"model_type": "mistral"}, "of type 'mistral'"),
        ({"hidden_act": "gelu"}, "its activation is 'gelu'"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}}, "other factors than Llama 3's"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "type 'dynamic'",
        ),
        ({"attention_bias": True}, "does not fit the model"),
    ],
)
def test_a_model_that_would_compute_something_else_is_refused(
    values: dict[str, object], what: str, reference_of: References, tmp_path: Path
) -> None:
    assert what in refusal(changed(reference_of("llama").folder, tmp_path / "model", **values))


@pytest.mark.parametrize(
    ("rope", "what"),
    [
        (without(YARN, "mscale"), "has mscale_all_dim and no mscale"),
        ({**YARN, "attention_factor": 1.3}, "has an attention_factor of its own"),
        ({**YARN, "truncate": False}, "is not truncated (truncate=false)"),
    ],
)
def test_a_yarn_that_transformers_computes_otherwise_is_refused(
    rope: dict[str, object], what: str, reference_of: References, tmp_path: Path
) -> None:
    folder = changed(reference_of("latent-yarn").folder, tmp_path / "model", rope_parameters=rope)
    assert refusal(folder) == (
        "engine=megatron cannot train model.path of type 'deepseek_v3': its yarn rotary "
        f"embedding {what}."
    )


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("moe", {"num_experts_per_tok": 1}),
        ("moe-not-normalised", {"num_experts_per_tok": 1}),
        ("latent", {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}),
    ],
)
def test_one_expert_per_token_is_refused(
    name: str, values: dict[str, object], reference_of: References, tmp_path: Path
) -> None:
    text = refusal(changed(reference_of(name).folder, tmp_path / "model", **values))
    assert text.endswith(": its tokens go to one expert each (num_experts_per_tok=1).")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    assert "is not a folder" in refusal(tmp_path / "nothing")


def test_a_checkpoint_with_other_tensors_is_refused(
    reference_of: References, tmp_path: Path
) -> None:
    folder = reference_of("llama").folder
    tensors = read_tensors(folder)
    tensors["model.layers.0.extra.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    text = refusal(rewrite(folder, tmp_path / "model", tensors))
    assert "missing:     model.layers.0.mlp.up_proj.weight" in text
    assert "unexpected:  model.layers.0.extra.weight" in text


def test_a_long_sequence_on_one_rank_stops_all_of_them(
    reference_of: References, start: Start
) -> None:
    reference = reference_of("llama")
    world = start(reference.folder, 2)
    batch = make_batch(reference, (29, 4))
    with pytest.raises(RankFailed, match="max_tokens_per_gpu"):
        world.forward([batch.take([0]), batch.take([1])], ("logprobs",))


def test_a_whole_weight_that_is_marked_as_a_part_is_none() -> None:
    """Transformer Engine's linear maps mark all weights so: whole ones would count once
    a rank in a gradient's norm.
    """
    layer = nn.ModuleDict({"attention": nn.Linear(2, 2), "mlp": nn.Linear(2, 2)})
    for name, mode in {"attention": None, "mlp": "column"}.items():
        layer[name].parallel_mode, layer[name].weight.tensor_model_parallel = mode, True
    mark_whole(nn.ModuleDict({"0": layer}))
    assert [layer[name].weight.tensor_model_parallel for name in layer] == [False, True]
