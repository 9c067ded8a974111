"""Weights through memory that two processes of one GPU share (CUDA IPC).

Nothing is copied through the host. Every engine rank serves the rollout workers of its
own device. The memory that they share has two halves, of which one is filled while the
other is read. A tensor larger than a half takes it all, and the memory grows for one
that is larger still. Its handle travels as hex in JSON, over
:mod:`coupler.builtin.transports.connection`.
"""

from __future__ import annotations

import json
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from coupler.builtin.transports.connection import (
    ConnectedTransport,
    Listener,
    connected,
    header,
    send,
)
from coupler.builtin.transports.shape_check import check_fits
from coupler.builtin.transports.torch.packing import ALIGNMENT, Entry, Packer, let_go, tensor_of
from coupler.errors import CouplerError, WeightSyncError
from coupler.interfaces import Endpoint, Named, Rank, SendReceipt, Shapes, WeightUpdate
from coupler.system.imports import Late

if TYPE_CHECKING:
    import torch
else:
    torch = Late("torch", "coupler-core[fsdp]")

# of shared memory, or as much as the largest tensor
ARENA_BYTES = 512 << 20
# the number of both halves together
WHOLE = 2


class IpcTransport(ConnectedTransport):
    """Sends from every engine rank to the workers that run on the same device."""

    def __init__(self) -> None:
        super().__init__()
        # bytes that the last update needed, with which the next one begins
        self.largest = ARENA_BYTES

    def bind(self, rank: Rank) -> Endpoint:
        """Listen for the workers of this device.

        Raises:
            CouplerError: this process has no GPU.
        """
        return self.listen(Listener(rank, device=_device()))

    def send(self, weights: Iterable[Named], update: WeightUpdate, rank: Rank) -> SendReceipt:
        start = time.perf_counter()
        with self.listeners[update.endpoints[rank.index].address].accepted(update) as receivers:
            mine = [connection for connection, said in receivers if said.get("device") == _device()]
            sharing = _Sharing(mine, self.largest)
            packer = sharing.packer

            # without workers here too, since to produce a tensor is collective
            packer.pack(weights)
            self.largest = len(sharing.arena)
            sharing.close()

        return SendReceipt(
            update.version, packer.num_tensors, packer.num_bytes, time.perf_counter() - start
        )

    def receive(self, update: WeightUpdate, worker: Rank, shapes: Shapes) -> Iterator[Named]:
        mine = _device()
        with ExitStack() as stack:
            sender = None
            # every rank waits for every worker, to know which are its own
            for endpoint in update.endpoints:
                connection = stack.enter_context(connected(endpoint.address, update, device=mine))
                if json.loads(endpoint.address)["device"] == mine:
                    sender = connection

            if sender is None:
                raise WeightSyncError(
                    f"rollout worker {worker.index} is on {mine}, where no engine rank is.\n"
                    "  set:  sync.transport=nccl for rollouts on devices of their own, or tcp"
                )
            yield from _shared(sender, shapes)


class _Sharing:
    """The sender's side of one update: a memory, ``arena``, whose halves take turns."""

    def __init__(self, receivers: list[socket.socket], size: int) -> None:
        self.receivers = receivers
        # halves that were sent and not yet answered, oldest first
        self.unread: deque[int] = deque()
        self.turn = 1
        self.packer = Packer(self._next, self._ship, self._whole, 0)
        self._share(size)

    def _share(self, size: int) -> None:
        """Take an arena of ``size`` bytes, and let everybody open it."""
        self.arena = torch.empty(size, dtype=torch.uint8, device="cuda")
        self.packer.capacity = size // 2 // ALIGNMENT * ALIGNMENT
        self._ask({"arena": _export(self.arena)})

    def _forget(self) -> None:
        """Give the arena back, once nobody has it open."""
        self.drain()
        self._ask({"forget": True})
        del self.arena
        torch.cuda.ipc_collect()

    def _next(self) -> torch.Tensor:
        """Return the half that was not filled last, once everybody has read it."""
        self.turn = 1 - self.turn
        while self.turn in self.unread or WHOLE in self.unread:
            self._answered()
        return self.arena[self.turn * self.packer.capacity :]

    def _ship(self, data: torch.Tensor, entries: list[Entry]) -> None:
        self._fill(self.turn, entries)

    def _whole(self, flat: torch.Tensor, entry: Entry) -> None:
        """Send a tensor that is larger than a half."""
        self.drain()
        if len(self.arena) < len(flat):
            # first the smaller one goes, so that both are never there at once
            self._forget()
            self._share(len(flat))
        self.arena[: len(flat)].copy_(flat)
        self._fill(WHOLE, [entry])

    def _fill(self, part: int, entries: list[Entry]) -> None:
        torch.cuda.current_stream().synchronize()
        start = 0 if part == WHOLE else part * self.packer.capacity
        self._send({"start": start, "entries": entries})
        self.unread.append(part)

    def drain(self) -> None:
        """Wait until everything that was sent has been read."""
        while self.unread:
            self._answered()

    def close(self) -> None:
        """End the stream."""
        self._forget()
        self._ask({})

    def _answered(self) -> None:
        self._wait()
        self.unread.popleft()

    def _ask(self, said: dict[str, Any]) -> None:
        """Say ``said`` to everybody, and wait until all have answered."""
        self._send(said)
        self._wait()

    def _send(self, said: dict[str, Any]) -> None:
        for receiver in self.receivers:
            send(receiver, said)

    def _wait(self) -> None:
        for receiver in self.receivers:
            header(receiver)


def _shared(sender: socket.socket, shapes: Shapes) -> Iterator[Named]:
    """Open what the sender shares, piece by piece, and say when each was read."""
    arena = None

    while said := header(sender):
        if "forget" in said:
            arena = None
        elif "arena" in said:
            arena = _open(said["arena"])
        else:
            assert arena is not None
            for entry in said["entries"]:
                check_fits(entry["name"], entry["shape"], shapes)
                # the half gets no name, which would keep the arena open
                tensor = tensor_of(arena[said["start"] :], entry)
                yield entry["name"], tensor
                let_go(tensor)
            torch.cuda.current_stream().synchronize()
        send(sender, {})

    send(sender, {})


def _export(memory: torch.Tensor) -> dict[str, Any]:
    """Return what another process opens ``memory`` with: uint8, [n]."""
    _, handle, size, offset, counter, counter_offset, event, wait = (
        memory.untyped_storage()._share_cuda_()
    )

    return {
        "handle": handle.hex(),
        "size": size,
        "offset": offset,
        "counter": counter.hex(),
        "counter_offset": counter_offset,
        "event": event.hex(),
        "wait": bool(wait),
        "start": memory.storage_offset(),
        "count": len(memory),
    }


def _open(shared: dict[str, Any]) -> torch.Tensor:
    """Open the memory that :func:`_export` described."""
    storage = torch.UntypedStorage._new_shared_cuda(
        torch.cuda.current_device(),
        bytes.fromhex(shared["handle"]),
        shared["size"],
        shared["offset"],
        bytes.fromhex(shared["counter"]),
        shared["counter_offset"],
        bytes.fromhex(shared["event"]),
        shared["wait"],
    )

    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return whole.set_(storage, shared["start"], (shared["count"],), (1,))  # type: ignore[call-overload]


def _device() -> str:
    """Return the UUID of the GPU that this process uses.

    Raises:
        CouplerError: it has none.
    """
    if not torch.cuda.is_available():
        raise CouplerError(
            "sync.transport=ipc needs a GPU on both sides.\n  set:  sync.transport=tcp"
        )
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
