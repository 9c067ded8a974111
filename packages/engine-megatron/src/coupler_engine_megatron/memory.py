"""Move what a model and its optimizer hold between the device and the host, storage by storage.

Megatron's parameters and gradients are views of a few large buffers, and many tensors point into each: it is the
storage behind them that gives its memory back, and every view is whole again once it has it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Parked:
    """Storages that are on the host now."""

    def __init__(self) -> None:
        self._host: dict[str, list[tuple[Tensor, Tensor]]] = {}  # by what they are: (a view of the storage, its copy)

    def offload(self, what: str, tensors: Iterable[Tensor]) -> None:
        """Copy the storages of ``tensors`` to the host and free their memory; those that are there already stay."""
        if what in self._host:
            return
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
        self._host[what] = []
        for tensor in storages.values():
            whole = _bytes_of(tensor)
            copy = torch.empty(len(whole), dtype=torch.uint8, pin_memory=whole.is_cuda)
            self._host[what].append((tensor.detach(), copy.copy_(whole)))
        for tensor in storages.values():
            tensor.untyped_storage().resize_(0)

    def onload(self, what: str) -> None:
        """Undo :meth:`offload`."""
        for tensor, copy in self._host.pop(what, []):
            tensor.untyped_storage().resize_(len(copy))
            _bytes_of(tensor).copy_(copy)


def _bytes_of(tensor: Tensor) -> Tensor:
    """All of the storage that a tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
