"""Name the dtypes that engines compute and send in."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Precision(StrEnum):
    """The dtype of activations, and of the weights that they meet."""

    AUTO = "auto"  # bf16 on a GPU, fp32 on the CPU
    BF16 = "bf16"
    FP32 = "fp32"


class Products(StrEnum):
    """The dtype of the operands of the layers' matrix products."""

    AUTO = "auto"  # that of activations
    FP8 = "fp8"


def dtype_of(
    precision: Precision, device: torch.device, auto: torch.dtype | None = None
) -> torch.dtype:
    """Return the dtype that ``precision`` means on ``device``.

    Args:
        auto: the meaning of :attr:`Precision.AUTO`. None: bf16 on a GPU, fp32 on the
            CPU.
    """
    import torch

    if precision == Precision.AUTO:
        return auto or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    return torch.bfloat16 if precision == Precision.BF16 else torch.float32
