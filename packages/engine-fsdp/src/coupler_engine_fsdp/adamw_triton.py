"""Run AdamW (arXiv 1711.05101, algorithm 2) in one pass over memory.

It clips, updates, and writes the bf16 copy.
"""

# pyright: reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


def adamw(
    weight: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    copy: Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    scale: float,
) -> None:
    """Update ``weight`` and its moments (fp32), and ``copy`` from it.

    Args:
        grad: the gradient in any dtype, which is multiplied with ``scale``.
        step: the number of this step from 1, for the bias corrections.
    """
    size = weight.numel()
    if size:
        grid = (triton.cdiv(size, _BLOCK),)
        rate, root = lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
        keep, new1, new2 = 1 - lr * decay, 1 - beta1, 1 - beta2
        _adamw[grid](
            weight, grad, mean, square, copy, size, rate, root, keep, new1, new2, eps, scale, _BLOCK
        )


@triton.jit
def _adamw(
    weight,
    grad,
    mean,
    square,
    copy,
    size,
    rate,
    root,
    keep,
    new1,
    new2,
    eps,
    scale,
    block: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < size
    g = tl.load(grad + at, mask=inside).to(tl.float32) * scale
    m = tl.load(mean + at, mask=inside)
    v = tl.load(square + at, mask=inside)
    w = tl.load(weight + at, mask=inside) * keep
    m += (g - m) * new1
    v += (g * g - v) * new2
    w -= rate * m / (tl.sqrt(v) / root + eps)
    tl.store(mean + at, m, mask=inside)
    tl.store(square + at, v, mask=inside)
    tl.store(weight + at, w, mask=inside)
    tl.store(copy + at, w, mask=inside)
