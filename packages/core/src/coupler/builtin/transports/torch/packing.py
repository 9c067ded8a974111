"""Named tensors as bytes of one buffer after another: what a collective or shared memory carries at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from coupler.interfaces import Named
from coupler.system.imports import Late

if TYPE_CHECKING:
    import torch
else:
    torch = Late("torch", "coupler-core[fsdp]")

ALIGNMENT = 256  # bytes between the starts of two tensors: enough for every dtype and kernel

Entry = dict[str, Any]  # name, dtype, shape, framework, offset, nbytes: plain JSON


class Packer:
    """Copies tensors into a buffer as they come, and hands each full buffer to ``ship``.

    Args:
        buffer: called for the buffer to fill next, uint8.
        ship: called with the filled buffer's bytes and what they are.
        lend: called with a tensor that is larger than ``capacity``, as bytes; it may be read until the call returns.
        capacity: bytes of a buffer.
    """

    def __init__(
        self,
        buffer: Callable[[], torch.Tensor],
        ship: Callable[[torch.Tensor, list[Entry]], None],
        lend: Callable[[torch.Tensor, Entry], None],
        capacity: int,
    ) -> None:
        self.buffer, self.ship, self.lend, self.capacity = buffer, ship, lend, capacity
        self.current: torch.Tensor | None = None
        self.entries: list[Entry] = []
        self.used = self.num_tensors = self.num_bytes = 0

    def pack(self, weights: Iterable[Named]) -> None:
        """Carry all of ``weights``; a tensor is not touched once the next one was asked for."""
        for name, tensor in weights:
            flat, entry = as_bytes(tensor), entry_of(name, tensor)
            self.num_tensors += 1
            self.num_bytes += len(flat)
            if len(flat) > self.capacity:
                self.flush()
                self.lend(flat, entry)
                continue
            if self.used + len(flat) > self.capacity:
                self.flush()
            if self.current is None:
                self.current = self.buffer()
            self.current[self.used : self.used + len(flat)].copy_(flat)
            self.entries.append({**entry, "offset": self.used})
            self.used += -(-len(flat) // ALIGNMENT) * ALIGNMENT
        self.flush()

    def flush(self) -> None:
        if self.entries:
            assert self.current is not None
            self.ship(self.current[: self.used], self.entries)
            self.current, self.entries, self.used = None, [], 0


def entry_of(name: str, tensor: Any) -> Entry:
    numpy = isinstance(tensor, np.ndarray)
    dtype = tensor.dtype.str if numpy else str(tensor.dtype).removeprefix("torch.")
    size = int(tensor.nbytes)
    framework = "np" if numpy else "pt"
    return {
        "name": name,
        "dtype": dtype,
        "shape": list(tensor.shape),
        "framework": framework,
        "offset": 0,
        "nbytes": size,
    }


def as_bytes(tensor: Any) -> torch.Tensor:
    """[nbytes] uint8, on the tensor's device; a view where the tensor is contiguous."""
    if isinstance(tensor, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8))
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if len(flat) else torch.empty(0, dtype=torch.uint8, device=tensor.device)


def tensor_of(buffer: torch.Tensor, entry: Entry) -> Any:
    """What :class:`Packer` put into ``buffer``, in place; no view, so that :func:`let_go` frees the buffer of it."""
    if entry["framework"] == "np":
        data = buffer[entry["offset"] : entry["offset"] + entry["nbytes"]]
        return data.cpu().numpy().view(np.dtype(entry["dtype"])).reshape(entry["shape"])
    tensor = torch.empty(0, dtype=getattr(torch, entry["dtype"]), device=buffer.device)
    start, rest = divmod(int(buffer.storage_offset()) + entry["offset"], tensor.itemsize)
    assert not rest, entry
    shape = torch.Size(entry["shape"])
    return tensor.set_(buffer.untyped_storage(), start, shape)  # type: ignore[call-overload]


def let_go(tensor: Any) -> None:
    """Empty a tensor whose reader may still hold it: it would keep the buffer's memory in use."""
    if isinstance(tensor, torch.Tensor):
        tensor.data = tensor.new_empty(0)
