"""Pack named tensors into buffers, one after another.

A buffer is what a collective or shared memory carries at a time.
"""

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

# bytes between the starts of two tensors: enough for every dtype and kernel
ALIGNMENT = 256

# plain JSON: name, dtype, shape, framework, offset, nbytes
Entry = dict[str, Any]


class Packer:
    """Copies tensors into a buffer as they come, and hands each full buffer to
    ``ship``.

    Args:
        buffer: called for the buffer to fill next, uint8.
        ship: called with the filled buffer's bytes and what they are.
        lend: called with the bytes of a tensor that is larger than ``capacity``, which
            may be read until the call returns.
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
        """Carry all of ``weights``.

        A tensor is not touched once the next one was asked for.
        """
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
    """Describe a tensor, with an offset of 0."""
    numpy = isinstance(tensor, np.ndarray)

    return {
        "name": name,
        "dtype": tensor.dtype.str if numpy else str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "framework": "np" if numpy else "pt",
        "offset": 0,
        "nbytes": int(tensor.nbytes),
    }


def as_bytes(tensor: Any) -> torch.Tensor:
    """Return the bytes of a tensor, [nbytes] uint8, on its device.

    They are a view where the tensor is contiguous.
    """
    if isinstance(tensor, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8))
    flat = tensor.detach().contiguous().reshape(-1)
    if not len(flat):
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.view(torch.uint8)


def tensor_of(buffer: torch.Tensor, entry: Entry) -> Any:
    """Return the tensor that :class:`Packer` put into ``buffer``, without a copy.

    It is no view, so that :func:`let_go` frees the buffer of it.
    """
    if entry["framework"] == "np":
        data = buffer[entry["offset"] : entry["offset"] + entry["nbytes"]]
        return data.cpu().numpy().view(np.dtype(entry["dtype"])).reshape(entry["shape"])
    tensor = torch.empty(0, dtype=getattr(torch, entry["dtype"]), device=buffer.device)
    start, rest = divmod(int(buffer.storage_offset()) + entry["offset"], tensor.itemsize)
    assert not rest, entry
    shape = torch.Size(entry["shape"])
    return tensor.set_(buffer.untyped_storage(), start, shape)  # type: ignore[call-overload]


def let_go(tensor: Any) -> None:
    """Empty a tensor whose reader may still hold it.

    Otherwise the reader would keep the memory of the buffer in use.
    """
    if isinstance(tensor, torch.Tensor):
        tensor.data = tensor.new_empty(0)
