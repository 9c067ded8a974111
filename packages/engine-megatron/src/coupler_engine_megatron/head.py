"""Replace Megatron's output layer: one number per predicted token instead of logits.

Shapes: t local tokens, R predicted tokens of the micro-batch, L of them on this
context-parallel rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn

from coupler_engine_megatron import groups
from coupler_engine_megatron.packing import Packed
from coupler_engine_megatron.vocab_parallel import token_logprobs


class LogprobHead:
    """The ``forward`` of an output layer that computes outputs instead of logits.

    ``packed`` and ``want`` are set before each pass.
    """

    packed: Packed
    want: tuple[str, ...]

    def __init__(self, layer: ColumnParallelLinear, vocabulary: int, tile: int) -> None:
        self.layer, self.tile = layer, tile
        width = layer.output_size_per_partition
        self.first = groups.tensor().rank() * width
        # Rows that fill up the last rank's part are left out.
        self.width = min(max(vocabulary - self.first, 0), width)

    def __call__(
        self, hidden: Tensor, weight: Tensor | None = None, **unused: Any
    ) -> tuple[Tensor, None]:
        """Map [t / tp, 1, H] to [wanted, R], which Megatron's model transposes."""
        if self.layer.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        # Tied embeddings come as an argument.
        if weight is None:
            weight = self.layer.weight
            assert weight is not None

        packed = self.packed
        found = token_logprobs(
            hidden[:, 0][packed.sources],
            weight[: self.width],
            packed.targets,
            self.first,
            groups.tensor(),
            packed.temperature,
            "entropy" in self.want,
            "sum_pi_squared" in self.want,
            self.tile,
            packed.kept,
        )
        names = ("logprobs", "entropy", "sum_pi_squared")
        outputs: dict[str, Any] = dict(zip(names, found, strict=True))
        return _whole(torch.stack([outputs[name] for name in self.want]), packed), None


class ValueHead(nn.Module):
    """One value per token, in fp32 for every dtype of the backbone.

    Every tensor-parallel rank has all of it.
    """

    packed: Packed
    want: tuple[str, ...]

    def __init__(
        self,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        sequence_parallel: bool,
        *,
        bias: bool,
    ) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel

        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype, device=device)) if bias else None

    def forward(self, hidden: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """Map [t / tp, 1, H] to [1, R]."""
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        states = hidden[:, 0][self.packed.sources].float()
        values = torch.mv(states, self.weight[0].float())
        if self.bias is not None:
            values = values + self.bias.float()
        return _whole(values[None], self.packed), None


def _whole(local: Tensor, packed: Packed) -> Tensor:
    """Map [n, L] to [n, R]: the outputs of all context-parallel ranks, on each.

    A gradient goes to where its output came from.
    """
    group = groups.context()
    if group.size() == 1:
        return local
    spread = local.new_zeros(len(local), packed.num_rows).index_copy(1, packed.places, local)
    return _SumOver.apply(spread, group)


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None
