"""Move a model and its optimizer between the device and the host, storage by storage.

Megatron's parameters and gradients are views of a few large buffers, and many tensors
point into each. The storage behind them gives its memory back, and every view is whole
again once the storage has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Parked:
    """The storages that are on the host now."""

    def __init__(self) -> None:
        self._host: dict[str, list[_Storage]] = {}
        """The storages by what they hold."""

    def offload(self, what: str, tensors: Iterable[Tensor], *, zeros: bool = False) -> None:
        """Copy the storages of ``tensors`` to the host and free their memory.

        Those that are there already stay.

        Args:
            zeros: the storages hold zeros, so that no copy is made.
        """
        if what in self._host:
            return
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
        self._host[what] = []
        for tensor in storages.values():
            whole = _bytes_of(tensor)
            copy = None
            if not zeros:
                copy = torch.empty(len(whole), dtype=torch.uint8, pin_memory=whole.is_cuda)
                copy.copy_(whole)
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
    view: Tensor
    """A view of the storage."""
    size: int
    """Bytes of the storage."""
    copy: Tensor | None
    """The bytes on the host, or None for zeros."""


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return all of the storage that a tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
