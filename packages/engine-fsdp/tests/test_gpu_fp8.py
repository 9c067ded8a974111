"""Matrix products in fp8 by the kernels of a GPU. Skipped without one that has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    CONFIGS,
    WANT,
    arrays,
    closeness,
    info,
    loss,
    make_batch,
    make_engine,
    write_model,
)
from test_fp8 import FP8, RECIPES, converted, cosine, curve, float8
from torch import nn
from transformers import Qwen3Config

from coupler_engine_fsdp import fp8
from coupler_engine_fsdp.config import FSDPConfig
from coupler_engine_fsdp.packing import pack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="no GPU that multiplies fp8",
    ),
]
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model whose sides are those that kernels like, and whose layers add as
    little to the residual stream as those of trained models do.
    """
    shape = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.03}
    config = {**CONFIGS["blocks"].to_dict(), **shape, "head_dim": 64}
    return write_model(tmp_path_factory.mktemp("calm"), Qwen3Config(**config))


def results(folder: Path, **settings: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return log-probs under ``loss_mask`` and the gradient of a batch whose tokens are
    no multiple of 16.
    """
    batch = make_batch().take(range(9))
    engine = make_engine(folder, **settings)
    tokens = pack(batch, torch.device("cuda")).tokens
    assert tokens.numel() % 16, "kernels get whole tiles"
    logprobs = engine.forward(batch, WANT)["logprobs"][batch["loss_mask"]]
    engine.forward_backward(batch, WANT, loss, info(batch))
    return logprobs, arrays(engine.gradients())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_results_are_near_those_of_bf16(calm: Path, recipe: str, compiled: bool) -> None:
    torch._dynamo.reset()
    want, true = results(calm)
    got, grads = results(
        calm, precision="fp8", fp8_recipe=recipe, compile=compiled, gradient_checkpointing=True
    )
    off = got - want
    assert 0.001 < np.sqrt((off**2).mean()) < 0.15 * want.std()
    least = 0.96 if recipe == "tensorwise" else 0.98
    assert least < cosine(grads, true)
    assert 0.9 < closeness(grads, true) < 1


@pytest.mark.parametrize("tokens", [2, 37, 512])
@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_multiply_what_is_emulated(recipe: str, tokens: int) -> None:
    """Both have the same operands, and sum their products in another order and
    precision. Rounding the operands moved the products by more.
    """
    torch.manual_seed(0)
    plain = nn.Linear(256, 96, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(1, tokens, 256, device="cuda", dtype=torch.bfloat16)
    config = FSDPConfig(precision="fp8", fp8_recipe=recipe)
    found = []
    for kernels in (True, False):
        chosen = fp8._recipe(config, kernels=kernels)
        linear = float8.float8_linear.Float8Linear.from_float(plain, config=chosen)
        found.append(products(linear, x))

    for got, emulated, true in zip(*found, products(plain, x), strict=True):
        rounding = (emulated - true).norm() / true.norm()
        assert (got - emulated).norm() / true.norm() < max(0.3 * float(rounding), 0.005)


def products(linear: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the output, and the gradients of input and weight, of one map."""
    x = x.clone().requires_grad_()
    linear.zero_grad()
    out = linear(x)
    (out.float() ** 3).sum().backward()
    assert x.grad is not None and linear.weight.grad is not None
    return [each.detach().float() for each in (out, x.grad, linear.weight.grad)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_loss_falls_as_in_bf16(calm: Path, recipe: str, compiled: bool) -> None:
    torch._dynamo.reset()
    settings = {"lr": 3e-3, "max_tokens_per_gpu": 64}
    without = curve(make_engine(calm, **settings))
    engine = make_engine(calm, precision="fp8", fp8_recipe=recipe, compile=compiled, **settings)
    assert len(converted(engine)) == 14
    fall = without[0] - without[-1]
    assert fall > 0.5, "the loss does not fall in bf16"
    assert np.abs(np.subtract(curve(engine), without)).max() < 0.15 * fall


def test_micro_batches_change_no_log_prob(calm: Path) -> None:
    """Rows of a product by kernels do not depend on the other rows' scales."""
    batch, found = make_batch(), []
    for limit in (30, 1000):
        settings = {**FP8, "max_tokens_per_gpu": limit}
        found.append(make_engine(calm, **settings).forward(batch, WANT)["logprobs"])
    tensorwise = {**FP8, "max_tokens_per_gpu": 30, "fp8_recipe": "tensorwise"}
    other = make_engine(calm, **tensorwise).forward(batch, WANT)["logprobs"]
    assert np.abs(found[0] - found[1]).mean() < 0.5 * np.abs(other - found[1]).mean()
