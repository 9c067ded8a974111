"""Experts as one grouped product: against a product of each, with experts that get no
token.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import References
from torch import Tensor

from coupler.interfaces import Model, Rank
from coupler_engine_megatron.config import MegatronConfig
from coupler_engine_megatron.cpu import cuda_as_cpu
from coupler_engine_megatron.engine import MegatronEngine
from coupler_engine_megatron.experts import (
    ColumnGroupedLinear,
    GroupedLinear,
    RowGroupedLinear,
    in_a_row,
)

INPUTS, OUTPUTS, COUNTS = 16, 24, [3, 0, 5, 1]


def linear(kind: type[GroupedLinear] = ColumnGroupedLinear, ranks: int = 1) -> GroupedLinear:
    groups = SimpleNamespace(expt_tp=SimpleNamespace(size=lambda: ranks))
    with cuda_as_cpu():
        made = kind(
            len(COUNTS),
            INPUTS,
            OUTPUTS,
            config=SimpleNamespace(params_dtype=torch.float64),
            pg_collection=groups,
        )  # type: ignore[arg-type]
    for weight in made.parameters():
        torch.nn.init.normal_(weight)
    return made.float()


def lay_out(layer: GroupedLinear, gap: int) -> Tensor:
    """Put parameters and their sums into one buffer each, from the last one, as
    Megatron does; return the sums.
    """
    parameters = list(layer.parameters())[::-1]
    size = sum(p.numel() + gap for p in parameters)
    data, sums, start = torch.zeros(size), torch.zeros(size), 0
    for parameter in parameters:
        place = slice(start, start + parameter.numel())
        data[place] = parameter.detach().reshape(-1)
        parameter.data = data[place].view(parameter.shape)
        parameter.main_grad = sums[place].view(parameter.shape)  # type: ignore[attr-defined]
        start = place.stop + gap
    return sums


def of_each(layer: GroupedLinear, tokens: Tensor) -> Tensor:
    weights = dict(layer.named_parameters())
    return torch.cat(
        [part @ weights[f"weight{i}"].T for i, part in enumerate(tokens.split(COUNTS))]
    )


@pytest.mark.parametrize("gap", [0, 64], ids=["in-a-row", "apart"])
@pytest.mark.parametrize("adds", [False, True])
def test_it_is_a_product_of_each_expert(gap: int, adds: bool) -> None:
    layer = linear()
    lay_out(layer, gap)
    layer.adds = adds
    torch.manual_seed(0)
    tokens, grad = (
        torch.randn(sum(COUNTS), INPUTS, requires_grad=True),
        torch.randn(sum(COUNTS), OUTPUTS),
    )
    want = of_each(layer, tokens)
    of_tokens, *of_weights = torch.autograd.grad(want, [tokens, *layer.parameters()], grad)
    for passes in (1, 2):  # sums grow
        tokens.grad = None
        got, bias = layer(tokens, COUNTS)
        got.backward(grad)
        assert bias is None
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(tokens.grad, of_tokens)
        for parameter, each in zip(layer.parameters(), of_weights, strict=True):
            found = parameter.main_grad if adds else parameter.grad  # type: ignore[attr-defined]
            torch.testing.assert_close(found, passes * each)
            assert (parameter.grad is None) == adds


def test_weights_in_a_row_are_not_copied() -> None:
    layer = linear()
    lay_out(layer, 0)
    seen: list[int] = []
    tokens = torch.randn(sum(COUNTS), INPUTS)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: seen.append(t.untyped_storage().data_ptr()) or t, lambda t: t
    ):
        layer(tokens.requires_grad_(), COUNTS)
    assert layer.weight0.untyped_storage().data_ptr() in seen  # type: ignore[union-attr]


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4, "dtype": "bf16"}])
def test_weights_that_do_not_train_are_not_copied(
    settings: dict[str, Any], reference_of: References
) -> None:
    """Megatron lays out what trains, and leaves frozen weights where they were made."""
    config = MegatronConfig(**settings)
    model = Model(str(reference_of("moe").folder), frozen=not settings)
    engine = MegatronEngine(config, model)
    engine.setup(Rank())
    if settings:
        engine._trained()
    modules = [module for chunk in engine.chunks for module in chunk.modules()]
    layers = [module for module in modules if isinstance(module, GroupedLinear)]
    assert len(layers) == 2 * 4
    for layer in layers:
        weights = [getattr(layer, f"weight{i}").detach() for i in range(layer.experts)]
        assert in_a_row(weights) is not None
    engine.close()


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_at_all_gives_gradients_of_zero(tokens: int) -> None:
    layer = linear()
    lay_out(layer, 0)
    got, _ = layer(torch.randn(tokens, INPUTS), [0, 0, tokens, 0])
    got.backward(torch.ones(tokens, OUTPUTS))
    assert got.shape == (tokens, OUTPUTS)
    assert [bool(w.grad is not None and w.grad.any()) for w in layer.parameters()] == [
        False,
        bool(tokens),
        False,
        False,
    ]


def test_ranks_split_outputs_or_inputs() -> None:
    assert linear(ColumnGroupedLinear, 2).weight1.shape == (OUTPUTS // 2, INPUTS)
    assert linear(RowGroupedLinear, 2).weight1.shape == (OUTPUTS, INPUTS // 2)
