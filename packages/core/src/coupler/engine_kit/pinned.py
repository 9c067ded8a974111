"""Host memory that a GPU reads and writes at the speed of its link."""

from __future__ import annotations

import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from coupler.errors import CouplerError
from coupler.system.log import get_logger
from coupler.system.process_memory import GIB, host_shortage

PAGE = mmap.PAGESIZE
# More threads map pages no faster.
THREADS = min(8, os.cpu_count() or 1)
log = get_logger(__name__)


class PinnedMemory:
    """One piece of host memory, pinned where there is a GPU.

    It has huge pages, which several threads map at once. With pages of 4 KiB and one
    thread, mapping and pinning take twenty times as long as a copy.

    Attributes:
        bytes: the memory, uint8 [size].
    """

    def __init__(self, size: int) -> None:
        """Allocate ``size`` bytes, more than 0.

        Raises:
            CouplerError: the host has less memory free.
        """
        if text := host_shortage(size):
            raise CouplerError(text)

        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            region.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(region, dtype=torch.uint8)

        share = -(-size // (THREADS * PAGE)) * PAGE
        with ThreadPoolExecutor(THREADS) as threads:
            for start in range(0, size, share):
                threads.submit(_map, self.bytes[start : start + share])
        if torch.cuda.is_available():
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


def _map(piece: Tensor) -> None:
    """Let the system map the pages of a piece, by one byte of each."""
    piece[::PAGE].zero_()
