"""Write safetensors files as tensors arrive, and read them by ranges of bytes.

There is no copy in between.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coupler.engine_kit import write_file
from coupler.errors import CouplerError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
MAX_HEADER_BYTES = 100_000_000
"""Largest header that the format allows."""
CHUNK_BYTES = 32 << 20
"""Size of the host buffer through which a device tensor is read."""


def write(path: Path, header: bytes, tensors: Iterable[Tensor]) -> list[str]:
    """Write host ``tensors`` as they come, in the order of ``header``.

    It returns what :func:`coupler.engine_kit.write_file` does.
    """
    return write_file(
        path, chain([memoryview(header)], (_bytes(tensor).numpy().data for tensor in tensors))
    )


def header(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the header of a file that holds ``tensors`` one after the other."""
    entries, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    # The spaces align the data.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class TensorFile:
    """One file, open for reading by several threads at a time.

    Raises:
        CouplerError: it is absent or not whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise CouplerError(f"the checkpoint lacks a file: {error}.") from None

        size = int.from_bytes(self._file.read(8), "little")
        try:
            self._entries: dict[str, Any] = json.loads(
                self._file.read(size) if size <= MAX_HEADER_BYTES else b""
            )
        except (ValueError, RecursionError):
            raise self._broken("its header is damaged") from None

        self._start = 8 + size
        end = max((entry["data_offsets"][1] for entry in self._entries.values()), default=0)
        if self._start + end != path.stat().st_size:
            raise self._broken(
                f"it has {path.stat().st_size} bytes, its header says {self._start + end}"
            )

    def close(self) -> None:
        self._file.close()

    def read(self, name: str, offset: int, target: Tensor) -> None:
        """Fill the contiguous ``target`` from byte ``offset`` of the tensor ``name``
        on.

        Raises:
            CouplerError: the file has no such tensor, or ends early.
        """
        if name not in self._entries:
            raise self._broken(f"it lacks {name}")

        at = self._start + self._entries[name]["data_offsets"][0] + offset
        into = _bytes(target)
        if target.device.type == "cpu":
            self._fill(into, at)
            return
        # Each thread has its own current device, and pinned memory belongs to it.
        with torch.cuda.device(target.device):
            buffer = torch.empty(min(CHUNK_BYTES, len(into)), dtype=torch.uint8, pin_memory=True)
            for part in into.split(CHUNK_BYTES):
                self._fill(buffer[: len(part)], at)
                part.copy_(buffer[: len(part)])
                at += len(part)

    def _fill(self, host: Tensor, at: int) -> None:
        data = host.numpy().data
        while data:
            count = os.preadv(self._file.fileno(), [data], at)
            if not count:
                raise self._broken("it ends early")
            data, at = data[count:], at + count

    def _broken(self, why: str) -> CouplerError:
        return CouplerError(f"{self.path} is damaged: {why}.\n  try:  an earlier checkpoint")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
