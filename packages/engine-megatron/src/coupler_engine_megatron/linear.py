"""Linear map that every tensor-parallel rank has whole, in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class WholeLinear(torch.nn.Linear):
    """Linear map for the compressed states of latent attention.

    Its gradient is summed if each rank has a part of the tokens.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **unused: Any
    ) -> None:
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010  # Megatron looks there

    def forward(self, input: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the product, and no bias, as Megatron's linear maps do."""
        return super().forward(input), None
