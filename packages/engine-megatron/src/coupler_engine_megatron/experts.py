"""The linear maps of a rank's experts as one grouped product, in place of Transformer Engine's product per expert.

Transformer Engine starts one product of each expert and asks cuBLAS every time which kernel to take: with many experts
that takes the host longer than the products take the GPU.

Shapes: n tokens, sorted by expert; E experts of this rank; I inputs, O outputs of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import grouped_mm


class GroupedLinear(nn.Module):
    """One matrix per expert, ``weight0`` to ``weight{E - 1}``, as Transformer Engine names them."""

    split_dim: int  # of the two that expert-tensor-parallel ranks split

    def __init__(
        self, experts: int, inputs: int, outputs: int, *, config: TransformerConfig, pg_collection: Any, **unused: Any
    ) -> None:
        """Build weights that mean nothing; ``inputs`` and ``outputs`` are those of all ranks together."""
        super().__init__()
        shape = [outputs, inputs]
        shape[self.split_dim] //= pg_collection.expt_tp.size()
        self.experts = experts
        self.adds = False  # the gradient of all experts at once to Megatron's sums; set once they exist
        for number in reversed(range(experts)):  # Megatron lays parameters out from the last: they rise in memory
            weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device()))
            set_tensor_model_parallel_attributes(weight, True, self.split_dim, 1)
            self.register_parameter(f"weight{number}", weight)

    def forward(self, tokens: Tensor, counts: Sequence[int]) -> tuple[Tensor, None]:
        """[n, I] tokens, of each expert so many -> [n, O], and no bias, as Megatron's linear maps return."""
        weights = _Together.apply(self.adds, *(getattr(self, f"weight{number}") for number in range(self.experts)))
        ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, pin_memory=tokens.is_cuda)
        ends = ends.to(tokens.device, non_blocking=True)
        return grouped_mm(tokens, weights.transpose(1, 2), offs=ends), None


class ColumnGroupedLinear(GroupedLinear):
    """Each expert-tensor-parallel rank has some of the outputs."""

    split_dim = 0


class RowGroupedLinear(GroupedLinear):
    """Each expert-tensor-parallel rank has some of the inputs."""

    split_dim = 1


def grouped_experts() -> ModuleSpec:
    """What Megatron builds experts of."""
    return ModuleSpec(
        TEGroupedMLP, submodules=MLPSubmodules(linear_fc1=ColumnGroupedLinear, linear_fc2=RowGroupedLinear)
    )


class _Together(torch.autograd.Function):
    """Weights of one shape -> [E, O, I], without a copy where they follow each other in memory."""

    @staticmethod
    def forward(ctx: Any, adds: bool, *weights: Tensor) -> Tensor:
        ctx.weights = weights if adds else ()
        whole = in_a_row([weight.detach() for weight in weights])
        return torch.stack(weights) if whole is None else whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not ctx.weights:
            return None, *grad.unbind()
        sums = [weight.main_grad for weight in ctx.weights]
        whole = in_a_row(sums)
        if whole is None:
            torch._foreach_add_(sums, list(grad.unbind()))
        else:
            whole += grad
        return None, *[None] * len(sums)


def in_a_row(tensors: list[Tensor]) -> Tensor | None:
    """Tensors of one shape that follow each other in memory as one, without a copy; None where they do not."""
    first, step = tensors[0], tensors[0].nbytes
    if first.untyped_storage().data_ptr() != tensors[-1].untyped_storage().data_ptr():
        return None
    start = first.data_ptr()
    if any(tensor.data_ptr() != start + i * step for i, tensor in enumerate(tensors)):
        return None
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
