"""Split each sequence over ranks: Ulysses (arXiv 2309.14509, section 3).

Each of k ranks holds n = N / k tokens of a packed row of N, with all heads. Attention
needs all tokens, but treats each head on its own. Before it, one all-to-all gives every
rank all N tokens of 1 / k of the heads. After it, another one brings them back. Nothing
else of a model mixes tokens, so that it works on its n tokens.

Each rank sends, per layer and forward pass, (k - 1) / k of

- n (H D + r G (D + E)) elements before attention, and
- n H E elements after it,

for H query heads of D elements, and G key heads with values of E elements. The backward
pass sends as much again, and so does a recomputation. r = k / gcd(k, G) is 1 where k
divides G. Otherwise each key and value head goes to r ranks, so that every rank has one
for each of its queries. The volume per rank falls as 1 / k at a fixed N, and hardly
grows where N grows with k. A rank keeps the activations of n tokens, in attention too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from coupler.errors import CouplerError
from coupler.interfaces import Layout

# An operator takes no process group, so that it gets a name.
_groups: dict[str, dist.ProcessGroup] = {}


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that hold a part of the same sequences, as one of them sees them.

    Attributes:
        size: ranks, k.
        index: the part that this rank holds, from 0.
        group: name of their process group.
    """

    size: int = 1
    index: int = 0
    group: str = ""

    def part(self, total: int) -> tuple[int, int]:
        """Return where this rank's part of a row begins and ends.

        The length of the row is a multiple of ``size``.
        """
        length = total // self.size
        return self.index * length, (self.index + 1) * length

    def whole(self, values: Tensor) -> Tensor:
        """Add up what peers computed, each in the places of its own tokens.

        Every peer then computes the same loss from the same values. Its gradient goes
        back to its own tokens alone, so that the sum over all ranks counts each token
        once.
        """
        if self.size == 1 or not values.numel():
            return values
        return _Whole.apply(values, self.group)

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Exchange tokens for heads: [1, heads, n, D] each -> [1, heads / k, N, D].

        Keys and values are repeated where k does not divide their heads.

        Raises:
            CouplerError: k does not divide the heads of ``query``.
        """
        heads = query.shape[1]
        repeats = self.size // gcd(self.size, key.shape[1])
        if heads % self.size:
            raise CouplerError(
                f"engine.sequence_parallel={self.size} does not divide the {heads} attention "
                "heads of a layer.\n  try:  engine.sequence_parallel=1"
            )
        if repeats > 1:
            key = key.repeat_interleave(repeats, 1)
            value = value.repeat_interleave(repeats, 1)

        # One exchange for all three.
        given = (query, key, value)
        parts = [self._by_rank(x) for x in given]
        widths = [x.shape[2] for x in parts]
        arrived = swap(torch.cat(parts, 2), self.group)

        return tuple(
            x.unflatten(1, (-1, old.shape[3])).transpose(0, 1)[None]
            for x, old in zip(
                arrived.flatten(0, 1).split(widths, 1),
                given,
                strict=True,
            )
        )

    def _by_rank(self, heads: Tensor) -> Tensor:
        """Order by receiver: [1, heads, n, D] -> [k, n, heads / k * D]."""
        return heads[0].unflatten(0, (self.size, -1)).transpose(1, 2).flatten(2)

    def to_tokens(self, out: Tensor) -> Tensor:
        """Undo :meth:`to_heads`: [1, N, heads / k, E] -> [1, n, heads, E]."""
        parts = out[0].unflatten(0, (self.size, -1))
        arrived = swap(parts.contiguous(), self.group)
        return arrived.transpose(0, 1).flatten(1, 2)[None]


ALONE = Peers()
"""A rank that holds whole sequences."""


def join_peers(size: int) -> Peers:
    """Make the process groups of every ``size`` neighbours, and return this rank's.

    It is a collective call of all ranks.
    """
    if size == 1:
        return ALONE
    group, _ = dist.new_subgroups(size)
    assert isinstance(group, dist.ProcessGroup)
    _groups[group.group_name] = group
    return Peers(size, dist.get_rank(group), group.group_name)


def leave_peers(peers: Peers) -> None:
    """Forget the process group, which ends with that of all ranks."""
    _groups.pop(peers.group, None)


def layout_of(world: int, size: int) -> Layout:
    """Let peers read the same rows, and the first of them answer."""
    ranks = range(world)
    return Layout(
        shard_of=tuple(i // size for i in ranks),
        answers=tuple(i % size == 0 for i in ranks),
    )


@torch.library.custom_op("coupler::swap", mutates_args=())
def swap(parts: Tensor, group: str) -> Tensor:
    """Send part i to peer i, and return what came, by peer: [k, n, C] -> [k, n, C].

    ``torch.compile`` does not look into it. Its own inverse, it is its own gradient.
    """
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=_groups[group])
    return arrived


@swap.register_fake
def _(parts: Tensor, group: str) -> Tensor:  # noqa: ARG001
    return torch.empty_like(parts)


def _keep(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:  # noqa: ARG001
    ctx.group = inputs[1]


def _back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return swap(grad.contiguous(), ctx.group), None


swap.register_autograd(_back, setup_context=_keep)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: str) -> Tensor:  # noqa: ARG004
        total = values.clone()
        dist.all_reduce(total, group=_groups[group])
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004  # pyright: ignore
        return grad, None
