"""Compute the linear maps of a rank's experts as one grouped product.

Transformer Engine starts one product of each expert instead, and asks cuBLAS every time
which kernel to take. With many experts that takes the host longer than the products
take the GPU.

Shapes: n tokens, sorted by expert; E experts of this rank; I inputs, O outputs of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """One matrix per expert, ``weight0`` to ``weight{E - 1}``.

    Transformer Engine names them so too.
    """

    split_dim: int
    """The dimension that expert-tensor-parallel ranks split."""

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: int,
        *,
        config: TransformerConfig,
        pg_collection: Any,
        **unused: Any,
    ) -> None:
        """Build weights that mean nothing.

        ``inputs`` and ``outputs`` are those of all ranks together.
        """
        super().__init__()
        shape = [outputs, inputs]
        shape[self.split_dim] //= pg_collection.expt_tp.size()
        self.experts = experts
        # If it is set, the gradient of all experts is added to Megatron's sums at once.
        # It is set once these exist.
        self.adds = False
        # Adds the experts' updates to the output [n, O] of tokens [n, I] and ends [E].
        self.update: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

        # One tensor holds them all, for weights that do not train. Megatron lays others
        # out anew, from the last parameter, so that these rise in memory.
        device = torch.cuda.current_device()
        whole = torch.empty(experts, *shape, dtype=config.params_dtype, device=device)
        for number in reversed(range(experts)):
            weight = nn.Parameter(whole[number])
            set_tensor_model_parallel_attributes(weight, True, self.split_dim, 1)
            self.register_parameter(f"weight{number}", weight)

    def forward(self, tokens: Tensor, counts: Sequence[int]) -> tuple[Tensor, None]:
        """Multiply [n, I] tokens, of which each expert has so many, into [n, O].

        There is no bias, for which Megatron's linear maps return None.
        """
        each = (getattr(self, f"weight{number}") for number in range(self.experts))
        weights = Together.apply(self.adds, *each)
        ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, pin_memory=tokens.is_cuda)
        ends = ends.to(tokens.device, non_blocking=True)

        output = grouped_mm(tokens, weights.transpose(1, 2), offs=ends)
        return output if self.update is None else self.update(output, tokens, ends), None


class ColumnGroupedLinear(GroupedLinear):
    """Linear maps of which each expert-tensor-parallel rank has some of the outputs."""

    split_dim = 0


class RowGroupedLinear(GroupedLinear):
    """Linear maps of which each expert-tensor-parallel rank has some of the inputs."""

    split_dim = 1


def grouped_experts() -> ModuleSpec:
    """Return the specification that Megatron builds experts of."""
    return ModuleSpec(
        TEGroupedMLP,
        submodules=MLPSubmodules(linear_fc1=ColumnGroupedLinear, linear_fc2=RowGroupedLinear),
    )


class Together(torch.autograd.Function):
    """Join weights of one shape into [E, O, I].

    No copy is made if they follow each other in memory.
    """

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
    """Return tensors of one shape as one, without a copy.

    It is None if they do not follow each other in memory.
    """
    first, step = tensors[0], tensors[0].nbytes
    if first.untyped_storage().data_ptr() != tensors[-1].untyped_storage().data_ptr():
        return None
    start = first.data_ptr()
    if any(tensor.data_ptr() != start + i * step for i, tensor in enumerate(tensors)):
        return None
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
