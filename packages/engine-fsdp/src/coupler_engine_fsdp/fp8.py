"""Compute the matrix products of the layers' linear maps in fp8, with torchao.

Every product scales its operands to the range of fp8 anew. Weights, their masters and
their names stay as they are.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from coupler.engine_kit.precision import Products
from coupler.errors import ConfigError
from coupler_engine_fsdp.config import FSDPConfig, Recipe
from coupler_engine_fsdp.model import Policy, layers_of
from coupler_engine_fsdp.value import ValueModel

MULTIPLE = 16
"""Kernels take maps whose inputs and outputs are a multiple of this."""
ROUTERS = {"gate", "router"}
"""Names of the modules that choose experts. A rounded product would choose others."""
LEAST = (8, 9)
"""The compute capability of the first GPUs whose tensor cores multiply fp8."""
ROUNDED = torch.float8_e4m3fn
"""The dtype of a layer's operands, which stands for their rounding."""


def convert(policy: Policy | ValueModel, config: FSDPConfig, *, kernels: bool) -> None:
    """Replace linear maps of the layers by those of fp8, on meta, if it is asked for.

    Embeddings, head, routers, experts and maps whose sides are no multiple of 16 stay.
    A map keeps its parameters, so that all that knows them by name or by identity
    finds them.

    Args:
        kernels: whether kernels multiply fp8. Without them, numbers are rounded to fp8
            and multiplied in fp32.

    Raises:
        ConfigError: no linear map can be replaced.
    """
    if config.precision != Products.FP8:
        return
    from torchao.float8 import convert_to_float8_training

    if not _maps_of(policy):
        raise ConfigError(
            "engine.precision=fp8 finds no linear map in the layers of model.path whose inputs "
            f"and outputs are a multiple of {MULTIPLE}.\n  try:  engine.precision=auto"
        )
    recipe = _recipe(config, kernels=kernels)
    for layer in layers_of(policy):
        convert_to_float8_training(
            layer, config=recipe, module_filter_fn=lambda module, name: _fits(name, module)
        )


def operand_bytes(policy: Policy | ValueModel, config: FSDPConfig, tokens: int) -> int:
    """Return the bytes of the largest two operands in fp8 that live together.

    It is asked before maps are replaced, and is 0 if none will be.
    """
    if config.precision != Products.FP8:
        return 0
    return max(
        (
            tokens * max(module.in_features, module.out_features) + module.weight.numel()
            for module in _maps_of(policy)
        ),
        default=0,
    )


def _maps_of(policy: Policy | ValueModel) -> list[nn.Linear]:
    """Return the linear maps whose products are in fp8."""
    return [
        module
        for layer in layers_of(policy)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and _fits(name, module)
    ]


def _fits(name: str, module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and not ROUTERS & set(name.split("."))
        and module.in_features % MULTIPLE == 0
        and module.out_features % MULTIPLE == 0
    )


def _recipe(config: FSDPConfig, *, kernels: bool) -> Any:
    """Return torchao's recipe.

    Gradients of weights are products over tokens. Where they are in fp8, the count of
    tokens is padded to a multiple of 16.
    """
    from torchao.float8 import Float8LinearConfig

    recipe = Float8LinearConfig.from_recipe_name(str(config.fp8_recipe))
    padded = config.fp8_recipe != Recipe.ROWWISE_WITH_GW_HP
    return replace(recipe, emulate=not kernels, pad_inner_dim=padded)


def has_kernels(config: FSDPConfig, device: torch.device) -> bool:
    """Tell whether the device multiplies fp8. The CPU emulates it.

    Raises:
        ConfigError: it is asked for, and the GPU is too old.
    """
    if device.type != "cuda":
        return False
    found = torch.cuda.get_device_capability(device)
    if config.precision == Products.FP8 and found < LEAST:
        raise ConfigError(
            "engine.precision=fp8 needs a GPU of compute capability "
            f"{_dotted(LEAST)} or later, and this one has {_dotted(found)}.\n"
            "  try:  engine.precision=auto"
        )
    return True


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def coarsest(config: FSDPConfig, compute: torch.dtype) -> torch.dtype:
    """Return the dtype whose rounding bounds that of the outputs."""
    return ROUNDED if config.precision == Products.FP8 else compute
