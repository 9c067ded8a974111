"""One rank in bf16: the model computes with copies of fp32 master weights, and no FSDP hook runs.

On several ranks FSDP casts shards as it gathers them. One rank has nothing to gather: here a weight is cast once a step
instead of twice a micro-batch. The gradient of the only micro-batch of a step stays where autograd left it, in bf16
with the copy; those of several are added to the master's fp32 gradient, each as soon as it is there.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from coupler_engine_fsdp.value import ValueHead


class Pair(NamedTuple):
    """A master weight, which checkpoints and the optimizer know, and the copy that the model computes with."""

    master: nn.Parameter
    copy: nn.Parameter


class Masters:
    """The pairs of one model; none where FSDP casts, or nothing does.

    Attributes:
        pairs: by the id of the master.
        adding: whether gradients go to the masters as they come: the step has several micro-batches.
    """

    def __init__(self) -> None:
        self.pairs: dict[int, Pair] = {}
        self.adding = False

    def split(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Replace every parameter but those of a value head by a copy in ``dtype``; one that is tied stays tied."""
        for owner in module.modules():
            if isinstance(owner, ValueHead):
                continue
            for name, master in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
                if id(master) not in self.pairs:
                    pair = Pair(master, nn.Parameter(master.detach().to(dtype), requires_grad=master.requires_grad))
                    if master.requires_grad:
                        pair.copy.register_post_accumulate_grad_hook(partial(self._came, pair))
                    self.pairs[id(master)] = pair
                setattr(owner, name, self.pairs[id(master)].copy)

    def _came(self, pair: Pair, _: Tensor) -> None:
        if self.adding:
            _settle(pair)

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Its gradient, wherever it is."""
        pair = self.pairs.get(id(parameter))
        return parameter.grad if pair is None or pair.copy.grad is None else pair.copy.grad

    def copy_of(self, parameter: Tensor) -> Tensor:
        """What the model computes with: the parameter itself where it was not split."""
        pair = self.pairs.get(id(parameter))
        return parameter if pair is None else pair.copy

    def settle(self) -> None:
        """Bring every gradient to its master."""
        for pair in self.pairs.values():
            _settle(pair)

    def clear(self) -> None:
        """Drop all gradients."""
        for pair in self.pairs.values():
            pair.master.grad = pair.copy.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the copies to what the masters have become."""
        if self.pairs:
            masters, copies = zip(*self.pairs.values(), strict=True)
            torch._foreach_copy_(copies, masters)

    @torch.no_grad()
    def move(self, device: torch.device) -> None:
        """Move the masters. Copies live on a GPU only: off it they hold no memory, on it they are made anew."""
        for master, copy in self.pairs.values():
            master.data = master.data.to(device)
            copy.data = torch.empty(0, dtype=copy.dtype) if device.type == "cpu" else master.data.to(copy.dtype)


def _settle(pair: Pair) -> None:
    grad, pair.copy.grad = pair.copy.grad, None
    if grad is None:
        return
    if pair.master.grad is None:
        pair.master.grad = grad.to(pair.master.dtype)
    else:
        pair.master.grad.add_(grad)
