"""Layers that are quantised take update after update, in the memory that kernels read.

SGLang's own fp8 needs a GPU (test_gpu.py). Here a layer is quantised by torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from coupler.engine_kit.inference.loading import least_precise
from coupler.errors import WeightSyncError
from coupler.interfaces import Named
from coupler_rollout_sglang.worker.quantized import layers, load, quantise_once

ROWS, COLUMNS = 4, 8


class Rows:
    """Quantises by rows, and transposes, as SGLang does on GPUs."""

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.weight.data
        scale = weight.abs().amax(-1, keepdim=True).float() / 448
        rounded = (weight / scale).to(torch.float8_e4m3fn)
        layer.weight = Parameter(rounded.t(), requires_grad=False)
        layer.weight_scale = Parameter(scale, requires_grad=False)


class Fused(torch.nn.Module):
    """A linear map whose weight has two tensors of the checkpoint, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.randn(2 * ROWS, COLUMNS).bfloat16(), requires_grad=False)
        self.weight.weight_loader = self.part  # type: ignore[attr-defined]
        self.bias = Parameter(torch.zeros(2 * ROWS).bfloat16(), requires_grad=False)

    def part(self, parameter: Parameter, tensor: torch.Tensor, index: int) -> None:
        parameter.data.narrow(0, ROWS * index, ROWS).copy_(tensor)


class TwoLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Fused(), Fused()

    def load_weights(self, weights: Iterable[Named]) -> None:
        parameters: dict[str, Any] = dict(self.named_parameters())
        for name, tensor in weights:
            layer, what = name.split(".")
            if what == "bias":
                parameters[name].data.copy_(tensor)
            else:
                weight = parameters[f"{layer}.weight"]
                weight.weight_loader(weight, tensor, int(what[-1]))


@pytest.fixture
def model() -> Iterator[TwoLayers]:
    made = TwoLayers()
    for layer in (made.first, made.second):
        quantise_once(Rows.process_weights_after_loading, Rows(), layer)
    yield made
    layers.clear()


def tensors(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    made = {}
    for layer in ("first", "second"):
        made |= {f"{layer}.part{i}": torch.randn(ROWS, COLUMNS, generator=draw) for i in (0, 1)}
        made[f"{layer}.bias"] = torch.randn(2 * ROWS, generator=draw)
    return {name: tensor.bfloat16() for name, tensor in made.items()}


def of(layer: Any) -> torch.Tensor:
    return (layer.weight.float() * layer.weight_scale.view(1, -1)).t()


def test_every_update_is_quantised_into_the_same_memory(model: TwoLayers, tmp_path: Path) -> None:
    places = [p.data_ptr() for p in model.parameters()]
    for seed in range(3):
        sent = tensors(seed)
        account = load(model, sent.items(), tmp_path)
        assert (account["num_received"], account["missing"], account["unused"]) == (6, [], [])
        assert [p.data_ptr() for p in model.parameters()] == places

        for name in ("first", "second"):
            layer = model.get_submodule(name)
            whole = torch.cat([sent[f"{name}.part0"], sent[f"{name}.part1"]]).float()
            assert (of(layer) - whole).abs().max() < whole.abs().max() / 16
            assert torch.equal(layer.bias, sent[f"{name}.bias"])
    assert least_precise(model) == "torch.float8_e4m3fn"


def test_what_was_loaded_has_memory_only_while_its_layer_is_loaded(
    model: TwoLayers, tmp_path: Path
) -> None:
    def held() -> int:
        found = [p for layer in layers.values() for p in layer.loaded.values()]
        return sum(p.untyped_storage().size() for p in found)

    most = []

    def watched() -> Iterator[Named]:
        for named in tensors(0).items():
            yield named
            most.append(held())

    load(model, watched(), tmp_path)
    assert max(most) == 2 * ROWS * COLUMNS * 2, "one layer in bf16 at a time"
    assert held() == 0


def test_a_part_that_did_not_come_is_missing_and_its_layer_stays(
    model: TwoLayers, tmp_path: Path
) -> None:
    load(model, tensors(0).items(), tmp_path)
    before = of(model.first).clone()
    sent = tensors(1)
    del sent["first.part1"]
    assert load(model, sent.items(), tmp_path)["missing"] == ["first.weight"]
    assert torch.equal(of(model.first), before)
    assert load(model, tensors(2).items(), tmp_path)["missing"] == []


def test_a_tensor_that_comes_again_is_one_that_nobody_takes(
    model: TwoLayers, tmp_path: Path
) -> None:
    sent = [*tensors(0).items(), ("first.part00", torch.ones(ROWS, COLUMNS).bfloat16())]
    assert load(model, sent, tmp_path)["unused"] == ["first.part00"]


def test_another_shape_names_the_tensor(model: TwoLayers, tmp_path: Path) -> None:
    sent = tensors(0) | {"first.part0": torch.zeros(ROWS, COLUMNS + 1).bfloat16()}
    with pytest.raises(WeightSyncError, match=r"first\.part0 does not fit"):
        load(model, sent.items(), tmp_path)


def test_sglang_asks_again_and_nothing_happens(model: TwoLayers, tmp_path: Path) -> None:
    load(model, tensors(0).items(), tmp_path)
    before = of(model.first).clone()
    quantise_once(Rows.process_weights_after_loading, Rows(), model.first)
    assert torch.equal(of(model.first), before)
