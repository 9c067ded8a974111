"""Host memory that a GPU reads and writes at the speed of its link."""

from __future__ import annotations

import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from coupler.errors import CouplerError
from coupler.system.log import get_logger
from coupler.system.process_memory import GIB, host_shortage

PAGE = mmap.PAGESIZE
# More threads map pages no faster.
THREADS = min(8, os.cpu_count() or 1)
# A thread maps so many bytes at a time.
PIECE = 64 << 20
log = get_logger(__name__)


class Promised:
    """Host memory that is being mapped, and that the system still calls free."""

    def __init__(self) -> None:
        self.bytes = 0
        self._lock = Lock()

    def take(self, size: int) -> None:
        """Promise ``size`` bytes.

        Raises:
            CouplerError: the host has less memory free, without what is promised.
        """
        with self._lock:
            if text := host_shortage(self.bytes + size):
                raise CouplerError(text)
            self.bytes += size

    def keep(self, size: int) -> None:
        """Say that so many promised bytes are mapped, or not wanted any more."""
        with self._lock:
            self.bytes -= size


promised = Promised()


class PinnedMemory:
    """One piece of host memory, pinned where there is a GPU.

    It has huge pages, which several threads map at once. With pages of 4 KiB and one
    thread, mapping and pinning take twenty times as long as a copy.

    Attributes:
        bytes: the memory, uint8 [size].
    """

    def __init__(self, size: int, device: torch.device | None = None) -> None:
        """Allocate ``size`` bytes, more than 0, in any thread.

        Args:
            device: the GPU to pin them for. Without it that of this thread is taken.

        Raises:
            CouplerError: the host has less memory free.
        """
        promised.take(size)
        try:
            region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:
            promised.keep(size)
            raise
        if hasattr(mmap, "MADV_HUGEPAGE"):
            region.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(region, dtype=torch.uint8)

        _map(self.bytes)
        if torch.cuda.is_available():
            on_gpu = device is not None and device.type == "cuda"
            # A new thread is on the first GPU, where pinning would take memory.
            with torch.cuda.device(device) if on_gpu else nullcontext():
                self._pin()

    def _pin(self) -> None:
        start, size = self.bytes.data_ptr(), self.bytes.numel()
        cuda: Any = torch.cuda.cudart()
        if error := int(cuda.cudaHostRegister(start, size, 0)):
            log.warning(
                f"{size / GIB:.1f} GiB of host memory could not be pinned (CUDA error {error}), "
                "so that copies to it and from it are slow"
            )
            return
        weakref.finalize(self, cuda.cudaHostUnregister, start).atexit = False


def _map(memory: Tensor) -> None:
    """Let the system map all pages, by one byte of each."""

    def touch(piece: Tensor) -> None:
        piece[::PAGE].zero_()
        promised.keep(piece.numel())

    pieces = memory.split(PIECE)
    with ThreadPoolExecutor(min(THREADS, len(pieces))) as threads:
        for piece in pieces:
            threads.submit(touch, piece)
