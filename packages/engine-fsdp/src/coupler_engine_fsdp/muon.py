"""Run Muon over the local shards of the layers' matrices.

An update is orthogonalised, which takes the whole matrix. Ranks share that work: each
gathers the rows of its matrices, orthogonalises them and hands the rows back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from coupler_engine_fsdp.config import FSDPConfig
from coupler_engine_fsdp.weights import shard_rows

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration (Jordan et al. 2024, kellerjordan.github.io/posts/muon)."""
ITERATIONS = 5
RMS = 0.2
"""The root mean square of an update in units of the learning rate, as AdamW's is."""


def orthogonalise(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return about ``U V^T`` of a matrix [rows, columns] ``U S V^T``, in fp32.

    Newton-Schulz: ``X <- a X + (b Y + c Y Y) X`` with ``Y = X X^T``, from X of norm 1.

    Args:
        dtype: that of the products.
    """
    a, b, c = COEFFICIENTS
    wide = matrix.shape[0] <= matrix.shape[1]
    x = (matrix if wide else matrix.T) / matrix.norm().clamp(min=1e-7)
    x = x.to(dtype)

    for _ in range(ITERATIONS):
        y = x @ x.T
        x = a * x + (b * y + c * y @ y) @ x

    return (x if wide else x.T).float()


class Muon:
    """Muon with Nesterov momentum and decoupled weight decay (arXiv 2502.16982).

    Updates are scaled by ``0.2 sqrt(max(rows, columns))`` (equation 4 there), so that
    one learning rate serves the matrices and what AdamW trains.
    """

    def __init__(
        self,
        config: FSDPConfig,
        shards: Mapping[str, nn.Parameter],
        shapes: Mapping[str, torch.Size],
        mesh: DeviceMesh,
        dtype: torch.dtype,
    ) -> None:
        """Allocate the momentum.

        Args:
            shards: this rank's rows of each matrix.
            shapes: the shapes of the whole matrices.
            dtype: that of the products of :func:`orthogonalise`.
        """
        self.config = config
        self.shards = shards
        self.shapes = shapes
        self.dtype = dtype

        axis = mesh.ndim - 1
        self.ranks = mesh.size(axis)
        self.rank = mesh.get_local_rank(axis)
        self.group = mesh.get_group(axis) if self.ranks > 1 else None
        self.momentum = {
            name: torch.zeros_like(shard, requires_grad=False) for name, shard in shards.items()
        }

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Apply the gradients of the shards. It is collective over the ranks."""
        keep = self.config.muon_momentum
        every = list(self.shards)
        for first in range(
            0,
            len(every),
            self.ranks,
        ):
            some = every[first : first + self.ranks]
            updates = []
            for name in some:
                gradient = self._gradient(name)
                momentum = self.momentum[name]
                momentum.lerp_(gradient, 1 - keep)
                updates.append(gradient.lerp(momentum, keep))

            for name, update in zip(
                some,
                self._orthogonal(some, updates),
                strict=True,
            ):
                shard = self.shards[name].detach()
                shard.mul_(1 - lr * self.config.weight_decay)
                scale = RMS * max(self.shapes[name]) ** 0.5
                shard.add_(update, alpha=-lr * scale)

    def _gradient(self, name: str) -> Tensor:
        gradient = self.shards[name].grad
        return torch.zeros_like(self.momentum[name]) if gradient is None else gradient.float()

    def _orthogonal(
        self,
        names: Sequence[str],
        updates: list[Tensor],
    ) -> list[Tensor]:
        """Orthogonalise one matrix per rank, given and returned as this rank's rows."""
        if self.group is None:
            return [orthogonalise(update, self.dtype) for update in updates]

        whole = self._exchange(
            names,
            updates,
            self._pieces(names),
        )
        mine = []
        if self.rank < len(names):
            shape = self.shapes[names[self.rank]]
            done = orthogonalise(torch.cat(whole).view(shape), self.dtype)
            rows = [
                shard_rows(
                    shape[0],
                    self.ranks,
                    rank,
                )
                for rank in range(self.ranks)
            ]
            mine = [done[each.start : each.stop] for each in rows]
        back = self._exchange(
            names,
            mine,
            [update.numel() for update in updates],
        )
        return [
            flat.view_as(update)
            for flat, update in zip(
                back,
                updates,
                strict=False,
            )
        ]

    def _pieces(self, names: Sequence[str]) -> list[int]:
        """Count the elements of this rank's matrix on each rank, 0 if it has none."""
        if self.rank >= len(names):
            return [0] * self.ranks

        rows, *columns = self.shapes[names[self.rank]]
        width = columns[0] if columns else 1
        return [
            len(
                shard_rows(
                    rows,
                    self.ranks,
                    rank,
                )
            )
            * width
            for rank in range(self.ranks)
        ]

    def _exchange(
        self, names: Sequence[str], sent: list[Tensor], received: list[int]
    ) -> list[Tensor]:
        """Send the i-th tensor to rank i, and return what each rank sent here, flat."""
        sizes = [tensor.numel() for tensor in sent] + [0] * (self.ranks - len(sent))
        received = received + [0] * (self.ranks - len(received))

        first = self.momentum[names[0]]
        given = torch.cat([t.reshape(-1) for t in sent]) if sent else first.new_empty(0)
        found = first.new_empty(sum(received))
        dist.all_to_all_single(
            found,
            given,
            received,
            sizes,
            group=self.group,
        )
        return list(found.split(received))


def matrices_of(named: Mapping[str, Any], layers: Sequence[nn.Module]) -> list[str]:
    """Name the parameters that Muon trains: matrices of the layers.

    Embeddings, the head, norms, biases and the experts of a layer in one tensor are
    left to AdamW.
    """
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    return [
        name for name, parameter in named.items() if id(parameter) in inside and parameter.ndim == 2
    ]
