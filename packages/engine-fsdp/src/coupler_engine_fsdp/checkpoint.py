"""Write and read sharded checkpoints that any number of ranks can read.

``shard-00002-of-00004.safetensors`` holds the rows of shard 2. Shard 0 also holds the
tensors that are not sharded, and ``index.json`` has the shapes. Ranks do not talk to
each other, neither to save nor to load.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from coupler.engine_kit import write_file
from coupler.engine_kit.json_files import DamagedFile, read_json
from coupler.errors import CouplerError, WaitTimeout
from coupler.interfaces import FileHashes
from coupler_engine_fsdp import tensorfile
from coupler_engine_fsdp.adamw8bit import CODES
from coupler_engine_fsdp.tensorfile import DTYPES, TensorFile
from coupler_engine_fsdp.weights import rows_of, shard_rows

INDEX = "index.json"
READERS = min(8, os.cpu_count() or 1)
"""Threads of one rank that read."""


class Save:
    """A save under way.

    The caller's thread copies ``tensors`` to the host, and another writes each once it
    is copied. Copies go into ``host`` memory of an earlier save, which returns there:
    memory seen for the first time costs more than the copy. What is ``on_host`` is
    written from there.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        index: Mapping[str, Any] | None,
        host: dict[str, Tensor],
        on_host: Callable[[Tensor], Tensor | None],
    ) -> None:
        self._path, self._host = path, host
        self._done: Future[FileHashes] = Future()
        # None is the end.
        self._copied: SimpleQueue[_Copy | None] = SimpleQueue()
        arguments = tensorfile.header(tensors) if tensors else b"", index
        threading.Thread(
            target=self._run, args=arguments, name=f"save {path.name}", daemon=True
        ).start()

        try:
            for name, tensor in tensors.items():
                there = on_host(tensor)
                own = host.pop(name, None) if there is None else None
                self._copied.put(_Copy(name, tensor, own, there))
        # The thread waits for the end even if copying failed.
        finally:
            self._copied.put(None)

    def end(self) -> None:
        """Wait until nothing is read any more, whether all was written or not."""
        wait([self._done])

    def wait(self, seconds: float) -> FileHashes:
        """Wait until every file is on disk.

        Raises:
            Exception: the disk is full, or refuses for another reason.
        """
        try:
            return self._done.result(seconds)
        except TimeoutError:
            raise WaitTimeout(
                f"{self._path} was not on disk after {seconds:.0f} s.\n  look at:  the disk, "
                "checkpoint.deadline_s"
            ) from None

    def _run(self, header: bytes, index: Mapping[str, Any] | None) -> None:
        """Write copies in the order of the header until None comes.

        Then :meth:`wait` returns.
        """
        hashes: dict[str, list[str]] = {}
        copies: list[_Copy] = []
        try:
            if index:
                text = memoryview(json.dumps(index).encode())
                hashes[INDEX] = write_file(self._path.parent / INDEX, [text])
            if header:
                tensors = self._arriving(copies)
                hashes[self._path.name] = tensorfile.write(self._path, header, tensors)
            self._host.update({copy.name: copy.host for copy in copies if copy.own})
            self._done.set_result(hashes)
        # This is the thread's boundary: wait() raises the error.
        except Exception as error:
            self._done.set_exception(error)

    def _arriving(self, copies: list[_Copy]) -> Iterator[Tensor]:
        while copy := self._copied.get():
            copies.append(copy)
            yield copy.arrived()


class _Copy:
    """A tensor on its way to the host, in its device's stream.

    No later update of the tensor can overtake the copy.

    Attributes:
        host: the numbers on the host.
        own: whether it is memory of its own. Otherwise they were there.
    """

    def __init__(
        self, name: str, tensor: Tensor, host: Tensor | None, there: Tensor | None
    ) -> None:
        self.name, self.event, self.own = name, None, there is None
        if there is not None:
            self.host = there
            return

        on_gpu = tensor.device.type == "cuda"
        if host is None:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        self.host = host
        self.host.copy_(tensor, non_blocking=True)
        if on_gpu:
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(tensor.device))

    def arrived(self) -> Tensor:
        if self.event:
            self.event.synchronize()
        return self.host


def save(
    path: Path,
    state: Mapping[str, Tensor],
    mesh: DeviceMesh,
    host: dict[str, Tensor],
    on_host: Callable[[Tensor], Tensor | None] = lambda _: None,
) -> Save:
    """Copy ``state`` to the host, and start to write it into the folder ``path``.

    Training may go on at once. ``host`` keeps the memory of the copies for the next
    save. It is empty at first.

    Args:
        on_host: where the host has a tensor already, if it has. Nobody writes there
            before :meth:`Save.end`.
    """
    shards, shard = mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1)
    # Other replicas hold the same rows.
    first = mesh.ndim == 1 or mesh.get_local_rank(0) == 0

    # In this order tensors are aligned without gaps.
    held: dict[str, Tensor] = {}
    for name, tensor in sorted(state.items(), key=lambda item: -item[1].itemsize):
        if isinstance(tensor, DTensor):
            if first and rows_of(tensor):
                held[name] = tensor.to_local().detach()
        elif first and shard == 0:
            held[name] = tensor

    index = {"shards": shards, "tensors": {name: _entry(tensor) for name, tensor in state.items()}}
    index = index if first and shard == 0 else None
    return Save(path / _file(shard, shards), held, index, host, on_host)


def is_native(path: Path, state: Mapping[str, Tensor]) -> bool:
    """Tell if a checkpoint's files are of this layout, or are not there.

    They are of another one if its moments have 8 bits and those of ``state`` fp32, or
    the other way round.
    """
    try:
        index = read_json(path / INDEX)
        if "shards" not in index:
            return False
        return "num_steps" not in state or _has_codes(state) == _has_codes(index["tensors"])
    except (DamagedFile, KeyError):
        return True


def _has_codes(names: Iterable[str]) -> bool:
    return any(name.endswith(f"/{CODES}") for name in names)


def load(path: Path, state: Mapping[str, Tensor]) -> None:
    """Fill the tensors of ``state`` in place, reading only this rank's rows.

    Raises:
        CouplerError: the checkpoint does not exist, is damaged, or lacks a tensor, or
            has it in another shape.
    """
    shards, stored = _read_index(path / INDEX)
    odd = [name for name, tensor in state.items() if not _fits(stored.get(name), tensor)]
    if odd:
        raise CouplerError(
            f"the checkpoint {path} does not fit this engine: {len(odd)} tensors are absent "
            "or of another shape, the first is "
            f"{odd[0]}.\n  try:  the model.path and the parts that it was saved with"
        )

    files: dict[int, TensorFile] = {}
    with ExitStack() as stack:
        reads: list[tuple[TensorFile, str, int, Tensor]] = []
        for name, tensor in state.items():
            for shard, offset, target in _pieces(tensor, shards if stored[name]["sharded"] else 1):
                if shard not in files:
                    file = TensorFile(path / _file(shard, shards))
                    files[shard] = stack.enter_context(closing(file))
                reads.append((files[shard], name, offset, target))

        with ThreadPoolExecutor(READERS) as threads:
            # The loop raises what a read raised.
            for _ in threads.map(lambda read: read[0].read(*read[1:]), reads):
                pass


def _pieces(tensor: Tensor, shards: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield where this rank's part of ``tensor`` is, which was cut into ``shards``.

    Yields:
        The shard, the byte offset there, and the tensor that its bytes fill.
    """
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    if shards == 1 and not isinstance(tensor, DTensor):
        yield 0, 0, local
        return

    mine = rows_of(tensor) if isinstance(tensor, DTensor) else range(len(tensor))
    size = len(shard_rows(len(tensor), shards, 0))
    for shard in range(mine.start // size, -(-mine.stop // size)) if mine else ():
        there = shard_rows(len(tensor), shards, shard)
        first, last = max(there.start, mine.start), min(there.stop, mine.stop)
        yield (
            shard,
            (first - there.start) * local[:1].nbytes,
            local[first - mine.start : last - mine.start],
        )


def _file(shard: int, shards: int) -> str:
    return f"shard-{shard:05d}-of-{shards:05d}.safetensors"


def _entry(tensor: Tensor) -> dict[str, Any]:
    return {
        "shape": list(tensor.shape),
        "dtype": DTYPES[tensor.dtype],
        "sharded": isinstance(tensor, DTensor),
    }


def _fits(stored: Mapping[str, Any] | None, tensor: Tensor) -> bool:
    return stored is not None and (stored["shape"], stored["dtype"]) == (
        list(tensor.shape),
        DTYPES[tensor.dtype],
    )


def _read_index(path: Path) -> tuple[int, dict[str, Any]]:
    try:
        index = read_json(path)
        return index["shards"], index["tensors"]
    except DamagedFile as error:
        raise CouplerError(f"{path.parent} holds no checkpoint of engine=fsdp: {error}") from None
    except KeyError as error:
        raise CouplerError(
            f"{path} is damaged: {error!r}.\n  try:  an earlier checkpoint"
        ) from None
