"""The ledger and the plan, on vLLM's own layers: as they are on a GPU, where they keep
their weights as loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from coupler.engine_kit.inference.checksums import checksum, of_plan
from coupler.engine_kit.inference.loading import copy, plans, record, shapes_of
from coupler.errors import WeightSyncError
from coupler.interfaces import Named
from coupler.testing.reference import TransformersReference


@pytest.fixture(scope="module")
def model(
    reference: TransformersReference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """vLLM's Qwen2 before its layers are packed."""
    from vllm.config import (
        DeviceConfig,
        LoadConfig,
        ModelConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.model_executor.model_loader.utils import initialize_model

    config = VllmConfig(
        model_config=ModelConfig(str(reference.folder), dtype="float32", skip_tokenizer_init=True),
        load_config=LoadConfig(load_format="dummy"),
        device_config=DeviceConfig("cpu"),
    )
    init = f"file://{tmp_path_factory.mktemp('dist') / 'init'}"
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, init, 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with torch.device("cpu"):
            made = initialize_model(config, model_config=config.model_config)
        for parameter in made.parameters():
            parameter.data.normal_()
        yield made
        cleanup_dist_env_and_memory()


def stream(reference: TransformersReference, factor: float = 1.0) -> Iterator[Named]:
    for name, tensor in reference.tensors.items():
        yield name, factor * torch.from_numpy(tensor)


def state(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_the_plan_gives_the_bits_that_the_loader_gives(
    model: Any, reference: TransformersReference
) -> None:
    folder = reference.folder
    with torch.no_grad():
        model.load_weights(stream(reference, 3.0))
        wanted = state(model)
        answer = record(model, stream(reference), folder)
        assert (answer["unused"], answer["missing"]) == ([], [])
        assert plans[model].keys() == reference.tensors.keys()
        again = copy(plans[model], stream(reference, 3.0))
    assert again == answer
    assert_equal(state(model), wanted)


def test_checksums_are_those_of_what_was_sent(model: Any, reference: TransformersReference) -> None:
    """Read back from fused parameters, under the checkpoint's names; an element that
    moves or flips its sign shows.
    """
    with torch.no_grad():
        record(model, stream(reference), reference.folder)
        sent = {name: checksum(tensor) for name, tensor in stream(reference)}
        assert of_plan(plans[model]) == sent
        name = "model.layers.0.self_attn.k_proj.weight"
        (piece,) = plans[model][name].pieces
        piece.into.copy_(piece.into.flip(0))
        moved = of_plan(plans[model])
        piece.into.copy_(piece.into.flip(0))
        piece.into[3, 5] *= -1
        flipped = of_plan(plans[model])
    assert len({sent[name], moved[name], flipped[name]}) == 3
    assert {**moved, name: 0} == {**flipped, name: 0} == {**sent, name: 0}


def test_the_plan_takes_what_is_not_contiguous(
    model: Any, reference: TransformersReference
) -> None:
    with torch.no_grad():
        record(model, stream(reference), reference.folder)
        wanted = state(model)
        record(model, stream(reference, 2.0), reference.folder)
        copy(
            plans[model],
            ((name, t.T.contiguous().T if t.ndim == 2 else t) for name, t in stream(reference)),
        )
    assert_equal(state(model), wanted)


@pytest.mark.parametrize("rows", [127, 256])
def test_another_shape_than_before_is_an_error(
    model: Any, reference: TransformersReference, rows: int
) -> None:
    """In shared memory the next tensor's elements would be read for those that lack."""
    name = "model.layers.0.self_attn.o_proj.weight"
    with torch.no_grad():
        record(model, stream(reference), reference.folder)
        with pytest.raises(
            WeightSyncError, match=rf"{name} does not fit .* \[{rows}, 128\], and was \[128, 128\]"
        ):
            copy(plans[model], [(name, torch.zeros(256, 128)[:rows])])


@pytest.mark.parametrize(
    "part", ["q_proj.bias", "k_proj.weight", "up_proj.weight", "embed_tokens.weight", "norm.weight"]
)
def test_what_is_left_out_is_missing_with_and_without_a_plan(
    model: Any, reference: TransformersReference, part: str
) -> None:
    dropped = next(name for name in reference.tensors if name.endswith(part))
    some = [(name, tensor) for name, tensor in stream(reference) if name != dropped]
    with torch.no_grad():
        plans.pop(model, None)
        assert record(model, some, reference.folder)["missing"] == [dropped]
        assert model not in plans, "a plan without a tensor would never miss it"
        record(model, stream(reference), reference.folder)
        assert copy(plans[model], some)["missing"] == [dropped]


def test_without_a_checkpoint_the_parameter_is_named(
    model: Any, reference: TransformersReference, tmp_path: Path
) -> None:
    some = [
        (name, tensor)
        for name, tensor in stream(reference)
        if "layers.0.self_attn.k_proj.weight" not in name
    ]
    with torch.no_grad():
        assert record(model, some, tmp_path)["missing"] == [
            "model.layers.0.self_attn.qkv_proj.weight"
        ]


def test_a_name_that_nobody_knows_is_unused_and_the_rest_is_loaded(
    model: Any, reference: TransformersReference
) -> None:
    named = list(stream(reference))
    named.insert(3, ("model.layers.99.nobody.weight", torch.zeros(4)))
    with torch.no_grad():
        answer = record(model, named, reference.folder)
    assert (answer["unused"], answer["missing"]) == (["model.layers.99.nobody.weight"], [])


def test_another_shape_is_an_error_that_names_the_tensor(
    model: Any, reference: TransformersReference
) -> None:
    name = "model.layers.0.mlp.gate_proj.weight"
    named = [(n, t[:, 1:] if n == name else t) for n, t in stream(reference)]
    with torch.no_grad(), pytest.raises(WeightSyncError, match=f"{name} does not fit"):
        record(model, named, reference.folder)


def test_shapes_are_those_of_the_plan_or_of_a_checkpoint_that_can_be_read(
    model: Any, reference: TransformersReference, tmp_path: Path
) -> None:
    def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
        return dict(shapes_of(model, folder))

    wanted = {name: tensor.shape for name, tensor in reference.tensors.items()}
    pointer = tmp_path / "pointer"
    pointer.mkdir()
    (pointer / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    plans.pop(model, None)
    assert [shapes(folder) for folder in (reference.folder, pointer, tmp_path)] == [wanted, {}, {}]
    with torch.no_grad():
        record(model, stream(reference), reference.folder)
    assert shapes(pointer) == wanted
