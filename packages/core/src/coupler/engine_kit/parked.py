"""Move tensors between a device and the host, storage by storage.

Many tensors may point into one storage. It gives its memory back, and every view is
whole again once the storage has it. The tensors stay the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from coupler.engine_kit.pinned import PinnedMemory

# Storages start at multiples of this in host memory, as on a device.
ALIGNED = 512


class Keep(StrEnum):
    """Says how much the host keeps of storages that leave the device."""

    ALL = "all"
    # The same, unless they left before and Parked.forget() was not called since.
    SAME = "same"
    # They come back as zeros.
    NOTHING = "nothing"


class Parked:
    """The storages that are off the device now, by the name of what they hold.

    Host memory is allocated when something leaves for the first time, or by
    :meth:`prepare`, and stays for the next time. Copies are made in a stream of their
    own.

    Attributes:
        copied: bytes that were copied to the host and back so far.
        allocated: bytes of host memory that were allocated so far, or are in
            preparation.
    """

    def __init__(self) -> None:
        self.copied = self.allocated = 0
        self._thread: ThreadPoolExecutor | None = None
        # Host memory that the thread maps and pins, until something leaves for it.
        self._preparing: dict[str, Future[PinnedMemory]] = {}

        self._away: dict[str, _Away] = {}
        self._host: dict[str, PinnedMemory] = {}
        # Where the host has what did not change, until forget().
        self._known: dict[str, list[_Place]] = {}
        self._coming: dict[str, torch.cuda.Event] = {}
        self._reader: Callable[[], object] | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def prepare(self, what: str, tensors: Iterable[Tensor]) -> None:
        """Allocate host memory for ``tensors`` in a thread, before they leave.

        They may be away. The first copy waits for the rest of the work, and raises the
        error of the thread. On a GPU the thread makes one CUDA call, which pins the
        memory. A graph that is captured in this process meanwhile needs
        ``capture_error_mode="thread_local"``.
        """
        views, places = _found(tensors)
        if what in self._away:
            places = self._away[what].places
        size = places[-1].end if places else 0
        if not size or what in self._host or what in self._preparing:
            return

        device = next((view.device for view in views.values()), None)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "pinned")
        self._preparing[what] = self._thread.submit(PinnedMemory, size, device)
        self.allocated += size

    def close(self) -> None:
        """Prepare nothing more. What the thread works on ends beside the caller."""
        self._preparing.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def offload(self, what: str, tensors: Iterable[Tensor], keep: Keep = Keep.ALL) -> None:
        """Copy the storages of ``tensors`` to the host, wait for that, and free their
        memory.

        What is away already stays as it is.

        Raises:
            CouplerError: the host has too little memory.
        """
        if what in self._away:
            return
        self.arrive(what)
        views, places = _found(tensors)
        if keep is Keep.ALL:
            self._copy_out(what, views, places)
        elif keep is Keep.SAME:
            self._copy_once(what, views, places)

        for view in views.values():
            view.untyped_storage().resize_(0)
        self._away[what] = _Away(views, places, keep is not Keep.NOTHING)

    def onload(self, what: str, *, wait: bool = True) -> None:
        """Undo :meth:`offload`.

        Args:
            wait: whether work that is queued from now on finds the tensors whole.
                Without it :meth:`arrive` has to come before.
        """
        views, places, kept = self._away.pop(what, NOBODY)
        for place in places:
            views[place.storage].untyped_storage().resize_(place.size)

        if kept and places:
            host = self._host[what].bytes
            with self._copying(what, views):
                for place in places:
                    whole = _bytes_of(views[place.storage])
                    whole.copy_(host[place.start : place.end], non_blocking=True)
                    self.copied += place.size
        else:
            for view in views.values():
                _bytes_of(view).zero_()
        if wait:
            self.arrive(what)

    def copy(self, what: str, tensors: Iterable[Tensor]) -> None:
        """Copy the storages of ``tensors`` to the host, and leave them where they are.

        A later :meth:`offload` with ``Keep.SAME`` has nothing to copy.

        Raises:
            CouplerError: the host has too little memory.
        """
        self.arrive(what)
        self._copy_once(what, *_found(tensors))

    def kept(self, what: str, tensor: Tensor) -> Tensor:
        """Return what the host keeps of a tensor that is away, and is contiguous.

        What is written to it is part of what comes back.
        """
        at = tensor.untyped_storage()._cdata
        (place,) = (place for place in self._away[what].places if place.storage == at)
        return self._view(what, place, tensor)

    def on_host(self, tensor: Tensor) -> Tensor | None:
        """Return the numbers of a contiguous tensor in host memory, or None.

        That is the tensor itself, or what ``Keep.SAME`` and :meth:`copy` know of it.
        """
        at = tensor.untyped_storage()._cdata
        if any(at == held.bytes.untyped_storage()._cdata for held in self._host.values()):
            return tensor
        for what, places in self._known.items():
            for place in places:
                if place.storage == at:
                    return self._view(what, place, tensor)
        return None

    def read_by(self, end: Callable[[], object]) -> None:
        """Let ``end`` return before anything is written to host memory again."""
        self._reader = end

    def settle(self) -> None:
        """Wait for the end of who reads host memory."""
        end, self._reader = self._reader, None
        if end:
            end()

    def _view(self, what: str, place: _Place, tensor: Tensor) -> Tensor:
        first = place.start + tensor.storage_offset() * tensor.itemsize
        host = self._host[what].bytes[first : first + tensor.nbytes]
        return host.view(tensor.dtype).view(tensor.shape)

    def arrive(self, *names: str) -> None:
        """Let work that is queued from now on wait for what comes back, by default for
        all of it.
        """
        for what in names or [*self._coming]:
            if event := self._coming.pop(what, None):
                torch.cuda.current_stream(event.device).wait_event(event)

    def forget(self, *names: str) -> None:
        """Say that storages may have been written to, by default all, so that none is
        the same.
        """
        for what in names or [*self._known]:
            self._known.pop(what, None)

    def _copy_once(self, what: str, views: dict[int, Tensor], places: list[_Place]) -> None:
        if self._known.get(what) != places:
            self._copy_out(what, views, places)
            self._known[what] = places

    def _copy_out(self, what: str, views: dict[int, Tensor], places: list[_Place]) -> None:
        self._known.pop(what, None)
        if places:
            self.settle()
        host = self._room(what, places)

        with self._copying(what, views):
            for place in places:
                whole = _bytes_of(views[place.storage])
                host[place.start : place.end].copy_(whole, non_blocking=True)
                self.copied += place.size
        if event := self._coming.pop(what, None):
            event.synchronize()

    def _room(self, what: str, places: list[_Place]) -> Tensor:
        size = places[-1].end if places else 0
        if preparing := self._preparing.pop(what, None):
            self._host[what] = preparing.result()
        held = self._host.get(what)

        if size and (held is None or held.bytes.numel() < size):
            # The old one is given back first.
            self._host.pop(what, None)
            del held
            self._host[what] = PinnedMemory(size)
            self.allocated += size

        return self._host[what].bytes if size else torch.empty(0, dtype=torch.uint8)

    @contextmanager
    def _copying(self, what: str, views: dict[int, Tensor]) -> Iterator[None]:
        """Queue copies behind what is queued now, beside what comes later."""
        device = next((view.device for view in views.values()), torch.device("cpu"))
        if device.type != "cuda":
            yield
            return

        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield
        self._coming[what] = event = torch.cuda.Event()
        event.record(stream)


class _Place(NamedTuple):
    """Says where a storage is in host memory."""

    storage: int
    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


class _Away(NamedTuple):
    views: dict[int, Tensor]
    """A view of each storage, by the storage."""
    places: list[_Place]
    kept: bool


NOBODY = _Away({}, [], False)


def _found(tensors: Iterable[Tensor]) -> tuple[dict[int, Tensor], list[_Place]]:
    """Return a view of each storage, and where it goes in host memory."""
    views = {tensor.untyped_storage()._cdata: tensor.detach() for tensor in tensors}
    return views, [*_places(views)]


def _places(views: dict[int, Tensor]) -> Iterator[_Place]:
    start = 0
    for storage, view in views.items():
        if size := view.untyped_storage().nbytes():
            yield _Place(storage, start, size)
            start += -(-size // ALIGNED) * ALIGNED


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return all of the storage that a tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
