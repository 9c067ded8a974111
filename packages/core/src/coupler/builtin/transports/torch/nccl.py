"""Weights through a collective, from engine rank 0 to workers on other devices.

The collective is NCCL's, or gloo's on the CPU.

Names, dtypes and shapes of each bucket travel over
:mod:`coupler.builtin.transports.connection`. Before the collective starts, every
receiver holds them against its own model, and answers with what it understood. The
group is made anew when its members change. On GPUs both sides only start work, which
their streams put in order, and wait for the last collective alone: none waits for a
process. Every receiver says when it has all. One that closes its connection before that
went away, and ends every wait at once.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from coupler.builtin.transports.connection import (
    ConnectedTransport,
    connected,
    header,
    headers,
    is_open,
    send,
)
from coupler.builtin.transports.shape_check import check_fits
from coupler.builtin.transports.torch.packing import Entry, Packer, tensor_of
from coupler.builtin.transports.waiting import wait_until
from coupler.engine_kit.rendezvous import keep_gloo_local, serve_store
from coupler.errors import WeightSyncError
from coupler.interfaces import Named, Rank, SendReceipt, Shapes, WeightUpdate
from coupler.system.imports import Late

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
else:
    torch = Late("torch", "coupler-core[fsdp]")
    dist = Late("torch.distributed", "coupler-core[fsdp]")

BUFFER_BYTES = 256 << 20
POLL_S = 0.0001
# after a collective failed: until its peer's end shows
GRACE_S = 1.0


class NcclTransport(ConnectedTransport):
    """Broadcasts from rank 0 of the engine, which is rank 0 of the group.

    Workers follow in the order in which they came.
    """

    def __init__(self) -> None:
        super().__init__()
        # by address of the sender and worker, which is -1 for the sender itself
        self.groups: dict[tuple[str, int], Group] = {}

    def send(self, weights: Iterable[Named], update: WeightUpdate, rank: Rank) -> SendReceipt:
        start = time.perf_counter()
        if rank.index:
            sizes = [int(tensor.nbytes) for _, tensor in weights]
            return SendReceipt(update.version, len(sizes), sum(sizes), time.perf_counter() - start)

        address = update.endpoints[0].address
        with self.listeners[address].accepted(update) as receivers:
            watch = Watch(update, [connection for connection, _ in receivers])
            group = self._gathered(address, receivers, watch)
            with group.given_up_on_failure():
                broadcast = _Broadcast(group, watch)
                broadcast.packer.pack(weights)
                broadcast.close()

        packer = broadcast.packer
        return SendReceipt(
            update.version, packer.num_tensors, packer.num_bytes, time.perf_counter() - start
        )

    def _gathered(
        self, address: str, receivers: list[tuple[socket.socket, dict[str, Any]]], watch: Watch
    ) -> Group:
        """Return the group of these receivers.

        It is the one of the last update if that has the same members, else a new one.
        """
        held = self.groups.pop((address, -1), None)
        if held and sorted(str(said.get("group")) for _, said in receivers) == sorted(held.members):
            for connection, _ in receivers:
                send(connection, {})
            group = held
        else:
            if held:
                held.process_group.abort()
            host = self.listeners[address].host
            store = serve_store(host, 0, watch.limit)
            world = 1 + len(receivers)
            shared = {"host": host, "port": store.port, "world": world, "cuda": _cuda()}
            for i, (connection, _) in enumerate(receivers):
                send(connection, {**shared, "rank": 1 + i})
            group = Group(store, 0, world, watch)

        self.groups[address, -1] = group
        return group

    def receive(self, update: WeightUpdate, worker: Rank, shapes: Shapes) -> Iterator[Named]:
        address = update.endpoints[0].address
        held = self.groups.pop((address, worker.index), None)
        with connected(address, update, group=held.name if held else "") as sender:
            watch = Watch(update, [sender])
            said = header(sender)

            if "port" in said:
                if said["cuda"] != _cuda():
                    raise WeightSyncError(
                        "sync.transport=nccl needs a GPU on both sides, or on neither."
                    )
                host, port, limit = said["host"], int(said["port"]), watch.limit
                store = _bounded(
                    lambda: dist.TCPStore(host, port, is_master=False, timeout=limit),
                    "store",
                    watch,
                )
                held = Group(store, said["rank"], said["world"], watch)

            assert held is not None
            with held.given_up_on_failure():
                yield from _received(held, sender, watch, shapes)
            self.groups[address, worker.index] = held


class Watch:
    """The waits of one side of an update.

    Each ends with the deadline, or when a peer goes away.
    """

    def __init__(self, update: WeightUpdate, peers: list[socket.socket]) -> None:
        # connections that nobody closes before the end
        self.update, self.peers = update, peers
        # torch's own waits end later than those here, which say more
        self.limit = timedelta(seconds=2 * update.deadline_s)

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """Return when ``ready()`` is true.

        Raises:
            WaitTimeout: it is not within the deadline.
            ConnectionError: a peer went away.
        """

        def done() -> bool:
            if ready():
                return True
            self.check()
            return False

        wait_until(
            done,
            f"the {what}, version {self.update.version}",
            self.update.deadline_s,
            every=POLL_S,
            look_at="the logs of the rollout's workers",
        )

    def check(self) -> None:
        if not all(map(is_open, self.peers)):
            raise ConnectionError("it closed the connection")

    def explain(self) -> None:
        """Look for the cause after a collective failed: its peer may have gone.

        Raises:
            ConnectionError: a peer went away.
        """
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end:
            self.check()
            time.sleep(POLL_S)


class Group:
    """A process group that nothing else in this process knows of."""

    def __init__(self, store: Any, rank: int, world: int, watch: Watch) -> None:
        self.rank, self.world = rank, world
        self.name = f"{store.port}-{rank}"
        # the receivers
        self.members = [f"{store.port}-{i}" for i in range(1, world)]
        # its server lives as long as this reference
        self.store = store
        self.device = torch.device("cuda" if _cuda() else "cpu")
        # by the first collective, which waits for all members
        self.connected = False
        self.process_group: Any = _bounded(
            lambda: self._made(watch.limit), "group that carries weights", watch
        )

    def _made(self, limit: timedelta) -> Any:
        """Return a process group. Gloo's waits for all members."""
        prefixed = dist.PrefixStore("coupler-weights", self.store)
        if not _cuda():
            keep_gloo_local(self.store.host)
            return dist.ProcessGroupGloo(prefixed, self.rank, self.world, limit)
        options = dist.ProcessGroupNCCL.Options()
        # its own limit, which ends this process
        options._timeout = limit
        return dist.ProcessGroupNCCL(prefixed, self.rank, self.world, options)

    @contextmanager
    def given_up_on_failure(self) -> Iterator[None]:
        """End collectives under way when the block fails, since nobody else will."""
        try:
            yield
        except BaseException:
            self.process_group.abort()
            raise

    def broadcast(self, data: torch.Tensor, watch: Watch) -> Any:
        """Start to send ``data`` from rank 0 to all.

        To start waits for nobody beyond the deadline.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        if self.connected:
            return self.process_group.broadcast([data], options)

        work = _bounded(
            lambda: self.process_group.broadcast([data], options),
            "first collective of weights",
            watch,
        )
        self.connected = True
        return work

    def order(self, work: Any, watch: Watch) -> None:
        """Make what follows wait for ``work``, if there is any.

        On a GPU that is what is launched from now on. On the CPU it is this thread.
        """
        if self.device.type != "cuda":
            self.settle(work, watch)
        elif work is not None:
            work.wait()

    def settle(self, work: Any, watch: Watch) -> None:
        """Return when ``work``, if any, is done.

        Raises:
            WaitTimeout: it is not within the deadline.
            ConnectionError: a peer went away.
        """
        if work is None:
            return
        watch.until(work.is_completed, "collective of weights")
        try:
            work.wait()
        except RuntimeError:
            watch.explain()
            raise


class _Buffers:
    """Two buffers that take turns.

    One is filled or read while the other travels.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.turn = device, 1
        self.held: list[torch.Tensor] = []

    def next(self) -> torch.Tensor:
        """Return the buffer whose turn it is, [BUFFER_BYTES] uint8."""
        self.turn = 1 - self.turn
        if len(self.held) <= self.turn:
            self.held.append(torch.empty(BUFFER_BYTES, dtype=torch.uint8, device=self.device))
        return self.held[self.turn]


class _Broadcast:
    """The sender's side of one update."""

    def __init__(self, group: Group, watch: Watch) -> None:
        self.group, self.watch, self.receivers = group, watch, watch.peers
        self.buffers = _Buffers(group.device)
        # what reads each buffer
        self.works: list[Any] = [None, None]
        self.last: Any = None
        self.packer = Packer(self._next, self._ship, self._lend, BUFFER_BYTES)

    def _next(self) -> torch.Tensor:
        buffer = self.buffers.next()
        self.group.order(self.works[self.buffers.turn], self.watch)
        return buffer

    def _ship(self, data: torch.Tensor, entries: list[Entry]) -> None:
        self.works[self.buffers.turn] = self._start(data, entries)

    def _lend(self, flat: torch.Tensor, entry: Entry) -> None:
        self.group.order(self._start(flat.to(self.group.device), [entry]), self.watch)

    def _start(self, data: torch.Tensor, entries: list[Entry]) -> Any:
        for receiver in self.receivers:
            send(receiver, {"entries": entries, "nbytes": len(data)})

        for said in headers(self.receivers, self.watch.update.deadline_s):
            if said.get("digest") != _digest(entries, len(data)):
                raise WeightSyncError(
                    f"a rollout worker expects other tensors than {entries[0]['name']} and "
                    "what follows it."
                )

        if not len(data):
            return None
        self.last = self.group.broadcast(data, self.watch)
        return self.last

    def close(self) -> None:
        for receiver in self.receivers:
            send(receiver, {})
        # each has all, and may go
        headers(self.receivers, self.watch.update.deadline_s)
        self.group.settle(self.last, Watch(self.watch.update, []))


def _received(group: Group, sender: socket.socket, watch: Watch, shapes: Shapes) -> Iterator[Named]:
    """Yield the tensors that come. The next bucket travels while the last is read.

    A collective into a buffer starts after all that was launched before, so after the
    work that read it.
    """
    buffers = _Buffers(group.device)
    before: tuple[list[Entry], torch.Tensor, Any] | None = None
    last, more = None, True

    while more:
        said = header(sender)
        started = None
        if more := "entries" in said:
            entries, size = said["entries"], said["nbytes"]
            for entry in entries:
                check_fits(entry["name"], entry["shape"], shapes)
            send(sender, {"digest": _digest(entries, size)})

            if size > BUFFER_BYTES:
                data = torch.empty(size, dtype=torch.uint8, device=group.device)
            else:
                data = buffers.next()[:size]
            work = group.broadcast(data, watch) if size else None
            last = work or last
            started = entries, data, work

        if before is not None:
            entries, data, work = before
            group.order(work, watch)
            for entry in entries:
                yield entry["name"], tensor_of(data, entry)
        before = started

    group.settle(last, watch)
    send(sender, {})


def _digest(entries: list[Entry], size: int) -> str:
    """Return the digest of what a collective carries.

    It is empty where the size does not hold the entries.
    """
    end = entries[-1]["offset"] + entries[-1]["nbytes"]
    if end > size:
        return ""
    return hashlib.sha256(json.dumps([entries, size], sort_keys=True).encode()).hexdigest()


def _bounded(call: Callable[[], Any], what: str, watch: Watch) -> Any:
    """Return the result of a call that has no deadline of its own.

    After a failed wait its thread is left behind.

    Raises:
        WaitTimeout: there was none in time.
        ConnectionError: a peer went away.
    """
    results: list[Any] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            if torch.cuda.is_available():
                torch.cuda.set_device(device)
            with stream:
                results.append(call())
        # raised below
        except BaseException as error:
            failures.append(error)

    device = torch.cuda.current_device() if _cuda() else 0
    stream = torch.cuda.stream(torch.cuda.current_stream() if _cuda() else None)
    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()

    watch.until(lambda: not thread.is_alive(), what)
    if failures:
        watch.explain()
        raise failures[0]
    return results[0]


def _cuda() -> bool:
    return torch.cuda.is_available()
