"""Train low-rank updates of the experts of a layer (LoRA, arXiv 2106.09685).

Transformers holds a matrix of all experts of a layer in one parameter. So are A and B,
and tokens meet those of their experts in grouped products.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, pad

from coupler_engine_fsdp.weights import like, local

if TYPE_CHECKING:
    from coupler_engine_fsdp.lora import Adapter

PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The matrices of an expert, by the parameter that holds them one above the other."""
ALIGNED = 8
"""Columns of bf16 come in multiples of so many in a grouped product on a GPU."""


class LoRAExperts:
    """The updates of one layer's experts.

    For each matrix of an expert, A [experts, rank, in] and B [experts, out, rank] are
    parameters of the module of the experts.
    """

    def __init__(
        self,
        module: Any,
        adapter: Adapter,
    ) -> None:
        """Add the parameters to a module of transformers, on meta, and compute with
        them.
        """
        self.module, self.adapter = module, adapter
        self.plain = module.forward
        # A product of groups in fp32 cannot be compiled.
        module.forward = torch.compiler.disable(self.forward)
        kind = {"device": "meta", "dtype": torch.float32}

        for key, parts in PARTS.items():
            experts, rows, columns = getattr(module, key).shape
            for part in parts:
                a = nn.Parameter(
                    torch.empty(
                        experts,
                        adapter.rank,
                        columns,
                        **kind,
                    )
                )
                b = nn.Parameter(
                    torch.empty(
                        experts,
                        rows // len(parts),
                        adapter.rank,
                        **kind,
                    )
                )
                module.register_parameter(f"lora_A_{part}", a)
                module.register_parameter(f"lora_B_{part}", b)

    def pair(self, part: str) -> tuple[nn.Parameter, nn.Parameter]:
        """Return A and B of a matrix."""
        return getattr(self.module, f"lora_A_{part}"), getattr(self.module, f"lora_B_{part}")

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield A and B of every matrix, with their names in the module."""
        for part in (part for parts in PARTS.values() for part in parts):
            yield from zip(
                (f"lora_A_{part}", f"lora_B_{part}"),
                self.pair(part),
                strict=True,
            )

    def forward(
        self,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
    ) -> Tensor:
        """Sum the outputs of each token's experts.

        Args:
            hidden: [tokens, hidden size].
            index, weights: the experts of each token and their weights, [tokens, k].
        """
        if not self.adapter.on:
            return self.plain(
                hidden,
                index,
                weights,
            )

        experts, chosen = self.module.gate_up_proj.shape[0], index.flatten()
        order = chosen.argsort(stable=True)
        every = torch.arange(experts, device=index.device)
        ends = torch.searchsorted(
            chosen[order],
            every,
            right=True,
        ).int()

        inputs = hidden[order // index.shape[1]]
        inner = self.module._apply_gate(
            self._map(
                "gate_up_proj",
                inputs,
                ends,
            )
        )
        out = (
            self._map(
                "down_proj",
                inner,
                ends,
            )
            * weights.flatten()[order, None]
        )
        return out[order.argsort()].view(*index.shape, -1).sum(1).to(hidden.dtype)

    def _map(
        self,
        key: str,
        inputs: Tensor,
        ends: Tensor,
    ) -> Tensor:
        """Map each group of rows by its expert's ``W + scale * B A``."""
        out = _grouped(
            inputs,
            getattr(self.module, key),
            ends,
        )
        updates, more = [], -self.adapter.rank % ALIGNED
        for a, b in map(self.pair, PARTS[key]):
            low = _grouped(
                inputs,
                pad(a, (0, 0, 0, more)),
                ends,
            )
            updates.append(
                _grouped(
                    low,
                    pad(b, (0, more)),
                    ends,
                )
            )

        return out + torch.cat(updates, 1) * self.adapter.scale

    def merged(
        self,
        key: str,
        weight: Tensor,
    ) -> Tensor:
        """Return this rank's experts of ``W + scale * B A`` of a parameter.

        Args:
            weight: its values.
        """
        pairs = [map(local, self.pair(part)) for part in PARTS[key]]
        update = torch.cat([torch.bmm(b, a) for a, b in pairs], 1)

        return like(update.mul_(self.adapter.scale).add_(local(weight)), weight)


def holds_experts(module: nn.Module) -> bool:
    """Tell if a module is one of experts whose matrices are those of :data:`PARTS`."""
    held = dict(module.named_parameters(recurse=False))
    stacked = all(name in held and held[name].ndim == 3 for name in PARTS)
    kind: Any = module
    return stacked and kind.has_gate and not (kind.has_bias or kind.is_transposed)


def _grouped(
    inputs: Tensor,
    weights: Tensor,
    ends: Tensor,
) -> Tensor:
    """Map rows [S, in] by the weights [experts, out, in] of their group."""
    return grouped_mm(
        inputs,
        weights.transpose(-2, -1),
        offs=ends,
    )
