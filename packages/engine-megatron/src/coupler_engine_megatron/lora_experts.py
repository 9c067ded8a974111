"""Train low-rank updates of a layer's experts (LoRA, arXiv 2106.09685).

Each expert has its own A and B, made as :mod:`coupler_engine_megatron.lora` says:
``lora_A0`` and ``lora_B0`` stand beside ``weight0``. Tokens meet those of their expert
in grouped products.

Shapes: n tokens, sorted by expert. E experts of this rank, with I inputs and O outputs
each. k maps of the checkpoint, r rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, one_hot, pad

from coupler_engine_megatron import groups
from coupler_engine_megatron import lora_tensors as hf
from coupler_engine_megatron.experts import GroupedLinear, Together

if TYPE_CHECKING:
    from coupler_engine_megatron.lora import Adapter

A, B = "lora_A", "lora_B"
ALIGNED = 8
"""Columns of bf16 come in multiples of so many in a grouped product on a GPU."""


class ExpertsUpdate:
    """The updates of one linear map of a rank's experts, ``scale * E A x`` of each.

    A is [k r, I] and B [O, r]. E [O, k r] is B with each row at the columns of its own
    A.
    """

    def __init__(
        self,
        adapter: Adapter,
        module: GroupedLinear,
        name: str,
        maps: int,
    ) -> None:
        """Give ``module`` an A and a B of each expert, and add their product to what it
        returns.

        Args:
            name: the name of its first weight in the whole model.
            maps: k, the checkpoint's weights that each expert's matrix is made of.
        """
        self.adapter, self.module = adapter, module
        weight: Any = module.weight0
        outputs, inputs = weight.shape
        of = hf.rows_of_maps(adapter.bridge, name, outputs).to(weight.device)
        # [O, k], 1 where a row is of a map.
        self.rows = one_hot(of, maps).to(weight.dtype)

        self._register(A, (maps * adapter.rank, inputs), dim=1)
        self._register(B, (outputs, adapter.rank), dim=0)
        module.update = self._add

    def _register(
        self,
        which: str,
        shape: tuple[int, int],
        dim: int,
    ) -> None:
        """Add A or B of every expert, of which ``dim`` is split as the weight's is."""
        module = self.module
        weight: Any = module.weight0
        # Alone, a rank has all of it, and no other rank a copy.
        parted = module.split_dim == dim or groups.expert_tensor().size() == 1

        # Megatron lays parameters out from the last, so that these rise in memory.
        for number in reversed(range(module.experts)):
            parameter = nn.Parameter(torch.zeros(shape, device=weight.device, dtype=weight.dtype))
            set_tensor_model_parallel_attributes(parameter, parted, dim if parted else -1, 1)
            # Its gradient is summed over the ranks that have the expert.
            setattr(parameter, "allreduce", False)  # noqa: B010  # Megatron looks there
            module.register_parameter(f"{which}{number}", parameter)

    def _add(
        self,
        output: Tensor,
        tokens: Tensor,
        ends: Tensor,
    ) -> Tensor:
        """Add the updates to the output [n, O] of tokens [n, I].

        Ranks that split an expert's matrices hold sums of this before and after, so
        that none is exchanged here.

        Args:
            ends: [E], the tokens up to the last one of each expert.
        """
        if not self.adapter.on:
            return output
        a, b = self._together(A), hf.expand(self._together(B), self.rows)
        more = -a.shape[1] % ALIGNED

        hidden = grouped_mm(tokens, pad(a, (0, 0, 0, more)).transpose(1, 2), offs=ends)
        update = grouped_mm(hidden, pad(b, (0, more)).transpose(1, 2), offs=ends)
        return output + update * self.adapter.scale

    def _together(self, which: str) -> Tensor:
        """Return A or B of all experts, [E, ...]."""
        each = [getattr(self.module, f"{which}{number}") for number in range(self.module.experts)]
        found = Together.apply(self.module.adds, *each)
        if each[0].tensor_model_parallel:
            return found
        return _Copied.apply(found, groups.expert_tensor())

    def merged(self, number: int) -> Tensor:
        """Return this rank's part of an expert's ``W + scale * E A``, in fp32."""
        weight, a, b = (getattr(self.module, f"{name}{number}") for name in ("weight", A, B))
        update = hf.expand(b.float(), self.rows) @ a.float()
        return weight.float() + self.adapter.scale * update


class _Copied(torch.autograd.Function):
    """Return a tensor of which every rank of a group has a copy.

    Each rank computes a part of its gradient. They are summed. Megatron's own function
    loses the sum of a gradient that is not contiguous.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        whole = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=ctx.group)
        return whole, None
