"""Keep fp32 master weights and bf16 copies on one rank, where no FSDP hook runs.

On several ranks FSDP casts shards as it gathers them. One rank has nothing to gather,
so that a weight is cast here once a step instead of twice a micro-batch. If a step has
one micro-batch, its gradient stays where autograd left it, in bf16 with the copy. If it
has several, each gradient is added to the master's fp32 gradient as soon as it is
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from coupler_engine_fsdp.value import ValueHead


class Pair(NamedTuple):
    """A master weight and the copy that the model computes with.

    Checkpoints and the optimizer know the master.
    """

    master: nn.Parameter
    copy: nn.Parameter


class Masters:
    """The pairs of one model. There are none if FSDP casts, or if nothing does.

    Attributes:
        pairs: the pairs by the id of the master.
        adding: whether gradients go to the masters as they come, since the step has
            several micro-batches.
    """

    def __init__(self) -> None:
        self.pairs: dict[int, Pair] = {}
        self.adding = False

    def split(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Replace every parameter by a copy in ``dtype``, except those of a value head.

        A tied parameter stays tied. A parameter in ``dtype`` needs no copy.
        """
        for owner in module.modules():
            if isinstance(owner, ValueHead):
                continue

            for name, master in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
                if master.dtype == dtype:
                    continue
                if id(master) not in self.pairs:
                    self.pairs[id(master)] = self._pair(master, dtype)
                setattr(owner, name, self.pairs[id(master)].copy)

    def _pair(self, master: nn.Parameter, dtype: torch.dtype) -> Pair:
        copy = nn.Parameter(master.detach().to(dtype), requires_grad=master.requires_grad)
        pair = Pair(master, copy)
        if master.requires_grad:
            copy.register_post_accumulate_grad_hook(partial(self._came, pair))
        return pair

    def _came(self, pair: Pair, _: Tensor) -> None:
        if self.adding:
            _settle(pair)

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient of a master, from the copy if it is there."""
        pair = self.pairs.get(id(parameter))
        return parameter.grad if pair is None or pair.copy.grad is None else pair.copy.grad

    def copy_of(self, parameter: Tensor) -> Tensor:
        """Return the copy of a master, or the parameter itself if it was not split."""
        pair = self.pairs.get(id(parameter))
        return parameter if pair is None else pair.copy

    def settle(self, masters: Iterable[Tensor] | None = None) -> None:
        """Bring gradients to their masters, by default to all of them."""
        ids = self.pairs if masters is None else map(id, masters)
        for master in ids:
            if master in self.pairs:
                _settle(self.pairs[master])

    def clear(self) -> None:
        """Drop all gradients."""
        for pair in self.pairs.values():
            pair.master.grad = pair.copy.grad = None

    @torch.no_grad()
    def refresh(
        self,
        masters: Iterable[Tensor] | None = None,
        values: Callable[[Tensor], Tensor] = lambda master: master,
    ) -> None:
        """Bring the copies to the values of their masters, by default of all of them.

        Args:
            values: where the numbers of a master are, if not in itself.
        """
        ids = self.pairs if masters is None else map(id, masters)
        pairs = [self.pairs[master] for master in ids if master in self.pairs]
        if pairs:
            torch._foreach_copy_([p.copy for p in pairs], [values(p.master) for p in pairs])


def cast_frozen(module: nn.Module, dtype: torch.dtype) -> None:
    """Hold the parameters that no step changes in ``dtype``, on meta.

    They need no fp32 master, so that bf16 takes 2 bytes of each. A value head computes
    in fp32 and stays as it is.
    """
    for owner in module.modules():
        if not isinstance(owner, ValueHead):
            for parameter in owner.parameters(recurse=False):
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(dtype)


def _settle(pair: Pair) -> None:
    grad, pair.copy.grad = pair.copy.grad, None
    if grad is None:
        return
    if pair.master.grad is None:
        pair.master.grad = grad.to(pair.master.dtype)
    else:
        pair.master.grad.add_(grad)
