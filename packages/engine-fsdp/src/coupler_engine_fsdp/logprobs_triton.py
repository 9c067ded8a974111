"""Compute the elementwise part of the log-probs as two Triton kernels.

Each reads a tile once. Arguments are those of
:mod:`coupler_engine_fsdp.logprobs_torch`.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
"""Columns that a program holds at a time."""


def reduce_tile(
    logits: Tensor,
    bias: Tensor | None,
    temperature: Tensor | None,
    targets: Tensor,
    log_z: Tensor,
    mean: Tensor,
    picked: Tensor,
    doubled: Tensor | None,
    want_mean: bool,
) -> None:
    """Add a tile to the running log-sum-exp and mean [R] (fp64).

    ``doubled`` is the log-sum-exp of twice the logits, or None. The logits of targets
    within the tile are copied to ``picked``.
    """
    rows, width = logits.shape

    if rows:
        _reduce[(rows,)](
            logits,
            bias,
            temperature,
            targets,
            log_z,
            mean,
            picked,
            doubled,
            width,
            want_mean,
            _BLOCK,
        )


def grad_tile(
    logits: Tensor,
    bias: Tensor | None,
    temperature: Tensor | None,
    targets: Tensor,
    log_z: Tensor,
    entropy: Tensor | None,
    squares: Tensor | None,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    grad_squares: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of the unscaled logits [R, v] in ``dtype``."""
    rows, width = logits.shape
    grad = torch.empty_like(logits, dtype=dtype)
    if rows:
        grid = (rows, triton.cdiv(width, _BLOCK))
        _grad[grid](
            logits,
            bias,
            temperature,
            targets,
            log_z,
            entropy,
            squares,
            grad_logprobs,
            grad_entropy,
            grad_squares,
            grad,
            width,
            _BLOCK,
        )
    return grad


@triton.jit
def _reduce(
    logits,
    bias,
    temperature,
    targets,
    log_z,
    mean,
    picked,
    doubled,
    width,
    want_mean: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * width
    scale = 1.0 if temperature is None else 1.0 / tl.load(temperature + row)
    highest = -float("inf")
    total = 0.0  # of exp(z - highest)
    weighted = 0.0  # of exp(z - highest) * z
    squared = 0.0  # of exp(2 (z - highest))
    for start in range(0, width, block):
        column = start + tl.arange(0, block)
        z = tl.load(logits + column, mask=column < width, other=-float("inf"))
        if bias is not None:
            z += tl.load(bias + column, mask=column < width, other=0.0)
        z *= scale
        higher = tl.maximum(highest, tl.max(z, 0))
        shrink = tl.exp(highest - higher)
        e = tl.exp(z - higher)
        total = total * shrink + tl.sum(e, 0)
        if want_mean:
            weighted = weighted * shrink + tl.sum(tl.where(e > 0, e * z, 0.0), 0)
        if doubled is not None:
            squared = squared * shrink * shrink + tl.sum(e * e, 0)
        highest = higher
    tile_log_z = (highest + tl.log(total)).to(tl.float64)
    before = tl.load(log_z + row)
    top = tl.maximum(before, tile_log_z)
    after = top + tl.log(tl.exp(before - top) + tl.exp(tile_log_z - top))
    tl.store(log_z + row, after)
    if want_mean:
        old = tl.load(mean + row)
        tl.store(
            mean + row, old + ((weighted / total).to(tl.float64) - old) * tl.exp(tile_log_z - after)
        )
    if doubled is not None:
        here = (2 * highest + tl.log(squared)).to(tl.float64)
        before = tl.load(doubled + row)
        top = tl.maximum(before, here)
        tl.store(doubled + row, top + tl.log(tl.exp(before - top) + tl.exp(here - top)))
    target = tl.load(targets + row)
    if (target >= 0) & (target < width):
        z = tl.load(logits + target)
        if bias is not None:
            z += tl.load(bias + target)
        tl.store(picked + row, z * scale)


@triton.jit
def _grad(
    logits,
    bias,
    temperature,
    targets,
    log_z,
    entropy,
    squares,
    grad_logprobs,
    grad_entropy,
    grad_squares,
    grad,
    width,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    here = row.to(tl.int64) * width + column
    scale = 1.0 if temperature is None else 1.0 / tl.load(temperature + row)
    z = tl.load(logits + here, mask=inside, other=-float("inf"))
    if bias is not None:
        z += tl.load(bias + column, mask=inside, other=0.0)
    log_p = z * scale - tl.load(log_z + row)
    slope = tl.load(grad_logprobs + row)
    factor = slope + tl.zeros_like(z)
    if grad_entropy is not None:
        factor += tl.load(grad_entropy + row) * (log_p + tl.load(entropy + row))
    if grad_squares is not None:
        factor -= 2 * tl.load(grad_squares + row) * (tl.exp(log_p) - tl.load(squares + row))
    out = tl.where(column == tl.load(targets + row), slope, 0.0) - factor * tl.exp(log_p)
    tl.store(grad + here, out * scale, mask=inside)
