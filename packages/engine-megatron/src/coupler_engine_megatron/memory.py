"""Move what a model and its optimizer hold between the device and the host, storage by storage.

Megatron's parameters and gradients are views of a few large buffers, and many tensors point into each: it is the
storage behind them that gives its memory back, and every view is whole again once it has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Parked:
    """Storages that are on the host now."""

    def __init__(self) -> None:
        self._host: dict[str, list[_Storage]] = {}  # by what they are

    def offload(self, what: str, tensors: Iterable[Tensor], *, zeros: bool = False) -> None:
        """Copy the storages of ``tensors`` to the host and free their memory; those that are there already stay.

        Args:
            zeros: they hold nothing else: no copy is made.
        """
        if what in self._host:
            return
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
        self._host[what] = []
        for tensor in storages.values():
            whole = _bytes_of(tensor)
            copy = None if zeros else torch.empty(len(whole), dtype=torch.uint8, pin_memory=whole.is_cuda).copy_(whole)
            self._host[what].append(_Storage(tensor.detach(), len(whole), copy))
        for tensor in storages.values():
            tensor.untyped_storage().resize_(0)

    def onload(self, what: str) -> None:
        """Undo :meth:`offload`."""
        for view, size, copy in self._host.pop(what, []):
            view.untyped_storage().resize_(size)
            whole = _bytes_of(view)
            whole.zero_() if copy is None else whole.copy_(copy)


class _Storage(NamedTuple):
    view: Tensor  # of it
    size: int  # bytes
    copy: Tensor | None  # None: zeros


def _bytes_of(tensor: Tensor) -> Tensor:
    """All of the storage that a tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
