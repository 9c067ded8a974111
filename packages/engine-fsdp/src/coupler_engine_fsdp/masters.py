"""One rank in bf16: the model computes with copies of fp32 master weights, and no FSDP hook runs.

On several ranks FSDP casts shards as it gathers them. One rank has nothing to gather: here a weight is cast once a step
instead of twice a micro-batch, and a gradient is added to the master's fp32 one as soon as autograd has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Pair(NamedTuple):
    """A master weight, which checkpoints and the optimizer know, and the copy that the model computes with."""

    master: nn.Parameter
    copy: nn.Parameter


def split(module: nn.Module, dtype: torch.dtype) -> list[Pair]:
    """Replace every parameter of ``module`` by a copy in ``dtype``; one that is tied stays tied."""
    pairs: dict[nn.Parameter, Pair] = {}
    for owner in module.modules():
        for name, master in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if master not in pairs:
                pairs[master] = Pair(master, nn.Parameter(master.detach().to(dtype)))
                pairs[master].copy.register_post_accumulate_grad_hook(partial(_add, master))
            setattr(owner, name, pairs[master].copy)
    return list(pairs.values())


def _add(master: nn.Parameter, copy: Tensor) -> None:
    """Move a gradient from the copy to the master."""
    if copy.grad is None:  # the loss does not depend on it
        return
    if master.grad is None:
        master.grad = copy.grad.to(master.dtype)
    else:
        master.grad.add_(copy.grad)
    copy.grad = None


@torch.no_grad()
def refresh(pairs: Sequence[Pair]) -> None:
    """Bring the copies to what the masters have become."""
    if pairs:
        torch._foreach_copy_([pair.copy for pair in pairs], [pair.master for pair in pairs])


@torch.no_grad()
def move(pairs: Sequence[Pair], device: torch.device) -> None:
    """Move the masters. Copies live on a GPU only: off it they hold no memory, on it they are made anew."""
    for master, copy in pairs:
        master.data = master.data.to(device)
        copy.data = torch.empty(0, dtype=copy.dtype) if device.type == "cpu" else master.data.to(copy.dtype)
