"""Weights through memory that two processes of one GPU share (CUDA IPC): no host copy, no second network.

Every engine rank serves the rollout workers of its own device. Two buffers take turns: one is filled while the other
is read. A tensor larger than a buffer travels in a copy. Handles are hex in JSON, over
:mod:`coupler.transports.connection`.
"""

from __future__ import annotations

import json
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch

from coupler.errors import CouplerError, WeightSyncError
from coupler.interfaces import Endpoint, Named, Rank, SendReceipt, Transport, WeightUpdate
from coupler.transports.connection import Listener, connected, header, send
from coupler.transports.packing import Entry, Packer, tensor_of

BUFFER_BYTES = 256 << 20  # two of them are the memory that a sync may take


class IpcTransport(Transport):
    """Rank i of the engine sends to the workers that run on the same device."""

    def __init__(self) -> None:
        self.listeners: dict[str, Listener] = {}

    def bind(self, rank: Rank) -> Endpoint:
        """Listen for the workers of this device.

        Raises:
            CouplerError: this process has no GPU.
        """
        listener = Listener(rank, device=_device())
        self.listeners[listener.address] = listener
        return Endpoint(listener.address)

    def send(self, weights: Iterable[Named], update: WeightUpdate, rank: Rank) -> SendReceipt:
        start = time.perf_counter()
        with self.listeners[update.endpoints[rank.index].address].accepted(update) as receivers:
            mine = [connection for connection, said in receivers if said["device"] == _device()]
            sharing = _Sharing(mine)
            packer = sharing.packer  # without workers here it packs all the same: to produce a tensor is collective
            packer.pack(weights)
            sharing.close()
        return SendReceipt(update.version, packer.num_tensors, packer.num_bytes, time.perf_counter() - start)

    def receive(self, update: WeightUpdate, worker: Rank) -> Iterator[Named]:
        mine = _device()
        with ExitStack() as stack:
            sender = None
            for endpoint in update.endpoints:  # every rank waits for every worker, to know which are its own
                connection = stack.enter_context(connected(endpoint.address, update, device=mine))
                if json.loads(endpoint.address)["device"] == mine:
                    sender = connection
            if sender is None:
                raise WeightSyncError(
                    f"rollout worker {worker.index} is on {mine}, where no engine rank is.\n"
                    "  set:  sync.transport=nccl for rollouts on devices of their own, or tcp"
                )
            yield from _shared(sender)


class _Sharing:
    """The sender's side of one update."""

    def __init__(self, receivers: list[socket.socket]) -> None:
        self.receivers = receivers
        self.buffers: dict[int, torch.Tensor] = {}
        self.exported: dict[int, dict[str, Any]] = {}
        self.unread: deque[int] = deque()  # buffers that were sent and not yet answered, oldest first
        self.turn = 1
        self.packer = Packer(self._next, self._ship, self._lend, BUFFER_BYTES)

    def _next(self) -> torch.Tensor:
        """The buffer that was not filled last, once everybody has read it."""
        self.turn = 1 - self.turn
        if self.turn not in self.buffers:
            self.buffers[self.turn] = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cuda")
            self.exported[self.turn] = _export(self.buffers[self.turn])
        if self.turn in self.unread:
            self._answered()
        return self.buffers[self.turn]

    def _ship(self, data: torch.Tensor, entries: list[Entry]) -> None:
        torch.cuda.current_stream().synchronize()
        self._send({"memory": self.exported[self.turn], "buffer": self.turn, "entries": entries})
        self.unread.append(self.turn)

    def _lend(self, flat: torch.Tensor, entry: Entry) -> None:
        """Share a copy. The engine's own memory is not shared: each time, torch would count one more owner of it."""
        self._forget()
        copy = flat.clone()
        torch.cuda.current_stream().synchronize()
        self._send({"memory": _export(copy), "entries": [entry]})
        self._wait()

    def _forget(self) -> None:
        """Give the buffers back once nobody has them open: they and a large copy are not there at once."""
        self.drain()
        if self.buffers:
            self._send({"forget": True})
            self._wait()
            self.buffers.clear()
            self.exported.clear()
            torch.cuda.ipc_collect()

    def drain(self) -> None:
        """Wait until everything that was sent has been read."""
        while self.unread:
            self._answered()

    def close(self) -> None:
        """End the stream."""
        self._forget()
        self._send({})
        self._wait()  # what was lent is closed too
        torch.cuda.ipc_collect()

    def _answered(self) -> None:
        self._wait()
        self.unread.popleft()

    def _send(self, said: dict[str, Any]) -> None:
        for receiver in self.receivers:
            send(receiver, said)

    def _wait(self) -> None:
        for receiver in self.receivers:
            header(receiver)


def _shared(sender: socket.socket) -> Iterator[Named]:
    """Open what the sender shares, piece by piece, and say when each was read."""
    buffers: dict[int, torch.Tensor] = {}
    while said := header(sender):
        if "forget" in said:
            buffers.clear()
            send(sender, {})
            continue
        turn = said.get("buffer", -1)  # -1: lent for this once
        memory = buffers[turn] if turn in buffers else _open(said["memory"])
        if turn >= 0:
            buffers[turn] = memory
        for entry in said["entries"]:
            tensor = tensor_of(memory, entry)
            yield entry["name"], tensor
            if isinstance(tensor, torch.Tensor):
                tensor.set_()  # whoever keeps the last one would keep the memory open, which the sender gives back
        torch.cuda.current_stream().synchronize()
        del memory
        send(sender, {})
    send(sender, {})


def _export(memory: torch.Tensor) -> dict[str, Any]:
    """What another process opens ``memory`` with: uint8, [n]."""
    _, handle, size, offset, counter, counter_offset, event, wait = memory.untyped_storage()._share_cuda_()
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
    """UUID of the GPU that this process uses.

    Raises:
        CouplerError: it has none.
    """
    if not torch.cuda.is_available():
        raise CouplerError("sync.transport=ipc needs a GPU on both sides.\n  set:  sync.transport=tcp")
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
