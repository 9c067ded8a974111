"""Hold AdamW's moments in 8 bits (arXiv 2110.02861), with torchao's AdamW8bit.

A block of numbers shares a scale. A row of a weight is whole blocks, so that the blocks
are the same on any number of ranks.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from coupler_engine_fsdp import flat
from coupler_engine_fsdp.config import FSDPConfig

BLOCKS = (256, 128, 64)
"""Sizes of a block. The largest one that divides the rows of a weight is taken."""
LEAST = 4096
"""Weights with fewer numbers have moments in fp32, as in section 2 of the paper."""
CODES, SCALES, MAP = "codes", "scales", "map"


def block_of(shape: Sequence[int]) -> int:
    """Return how many numbers of a weight share a scale, or 0 if its moments are fp32.

    Vectors, small weights, and weights whose rows are no whole blocks are.
    """
    row = math.prod(shape[1:])
    if len(shape) < 2 or shape[0] * row < LEAST:
        return 0
    return next((block for block in BLOCKS if row % block == 0), 0)


def blocks_of(named: Mapping[str, Tensor], embedding: Tensor) -> dict[str, int]:
    """Return :func:`block_of` of each weight whose moments have 8 bits.

    Those of the input embedding are fp32, as in section 2.3 of the paper.
    """
    blocks = {n: block_of(weight.shape) for n, weight in named.items() if weight is not embedding}
    return {name: block for name, block in blocks.items() if block}


def bytes_of(numbers: int, block: int) -> int:
    """Return the bytes of both moments of a weight."""
    return 2 * (numbers + 4 * numbers // block) if block else 8 * numbers


def optimizer(config: FSDPConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return AdamW8bit of these parameter groups, without moments."""
    from torchao.optim import AdamW8bit

    return AdamW8bit(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )


def advance(adamw: torch.optim.Optimizer, lr: float) -> None:
    """Take a step.

    It is compiled where Triton is, and elsewhere each operation runs by itself.
    """
    for group in adamw.param_groups:
        group["lr"].fill_(lr)
    on_gpu = any(p.is_cuda for group in adamw.param_groups for p in group["params"])
    compiled = on_gpu and find_spec("triton") is not None
    with torch.compiler.set_stance("default" if compiled else "force_eager"):
        adamw.step()


def zeros(
    shards: Mapping[str, Tensor], blocks: Mapping[str, int], signed: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Allocate one moment of each shard.

    Args:
        blocks: the size of a block, of each weight whose moments have 8 bits.
        signed: whether the moment may be below 0.

    Returns:
        The storages, and the moments in them, of torchao's ``OptimState8bit`` where
        they have 8 bits.
    """
    from torchao.optim.subclass_8bit import OptimState8bit

    device = next((shard.device for shard in shards.values()), None)
    # A rank that has no row of a weight has no block of it.
    sizes = [each.numel() for each in shards.values()]
    own = [blocks.get(name, 0) if each.numel() else 0 for name, each in shards.items()]
    pairs = [
        *zip(
            sizes,
            own,
            strict=True,
        )
    ]

    codes, all_codes = flat.zeros(
        [n if b else 0 for n, b in pairs],
        torch.uint8,
        device,
    )
    scales, all_scales = flat.zeros(
        [n // b if b else 0 for n, b in pairs],
        torch.float32,
        device,
    )
    whole, all_whole = flat.zeros(
        [0 if b else n for n, b in pairs],
        torch.float32,
        device,
    )

    table = _table(OptimState8bit, signed, device)
    moments = [
        OptimState8bit(
            code.view(shard.shape),
            scale,
            table,
            signed,
            torch.float32,
        )
        if block
        else full.view(shard.shape)
        for shard, block, code, scale, full in zip(
            shards.values(), own, all_codes, all_scales, all_whole, strict=True
        )
    ]
    return [codes, scales, whole], moments


def _table(kind: Any, signed: bool, device: torch.device | None) -> Tensor:
    """Return what codes stand for, fp32 [256].

    A second moment above 0 is never 0: where a gradient is 0 next, as that of an expert
    without tokens, the first moment over 0 would move a weight by thousands of steps.
    """
    table = kind.zeros((BLOCKS[0],), signed, BLOCKS[0], device).qmap
    if signed:
        return table

    floor = table.clone()
    floor[0] = table[1] / 2
    return floor


def parts(
    moment: Any,
    row: int,
    block: int,
) -> dict[str, Tensor]:
    """Return this rank's rows of the codes and of the scales of a moment.

    Codes are uint8 like the weight, scales fp32 [rows, blocks of a row].

    Args:
        row: numbers in a row of the weight.
    """
    if not len(moment):
        return {CODES: moment.to(torch.uint8), SCALES: moment.new_zeros(0, row // block)}
    return {CODES: moment.codes, SCALES: moment.scale.view(-1, row // block)}


def on(
    moment: Any,
    codes: Tensor,
    scales: Tensor,
) -> Tensor:
    """Return a moment like ``moment`` on other codes and scales."""
    return type(moment)(
        codes, scales.view(-1), moment.qmap.to(codes.device), moment.signed, torch.float32
    )
