"""OnTorchrun: rank 0 in this process, and each other one in a process of its own."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coupler.engine_kit.rendezvous import keep_port
from coupler.errors import WaitTimeout, WorkerDied
from coupler.executors.handle import Handle
from coupler.executors.host import Failure
from coupler.executors.local import LEAVE_S, Local
from coupler.executors.placement import Role
from coupler.executors.torchrun.launch import FILE, check_world, launch_of, listen
from coupler.executors.torchrun.wire import receive, send
from coupler.executors.waits import Waits
from coupler.interfaces import Rank
from coupler.system.threads import DaemonThreads

MEET_S = 120.0  # for the other processes to come, once rank 0 listens


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """Another process of torchrun, and the thread that calls it."""

    rank: int
    pid: int
    node: str
    connection: socket.socket
    thread: DaemonThreads

    def call(self, role: str, method: str, args: tuple[Any, ...]) -> Any:
        """Call a worker there, and wait for its answer.

        Raises:
            OSError: the process ended, or did not answer in time.
        """
        send(self.connection, (role, method, args))
        return receive(self.connection)

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid}, node {self.node})"


class OnTorchrun(Local):
    """Keeps rank 0 of a role in this process, and rank i in the process of rank i.

    The end of any process ends the run. Whatever torchrun says, this process speaks
    before it obeys.
    """

    def __init__(self, waits: Waits, run_dir: Path) -> None:
        super().__init__(inline=False, waits=waits)
        self.launch, self.run_dir = launch_of(os.environ), run_dir
        self.peers: dict[int, Peer] = {}
        self.starting: dict[Handle, asyncio.Future[Any]] = {}

    async def place(self, roles: Sequence[Role]) -> None:
        """Meet the other processes.

        Raises:
            ConfigError: they are not as many as a role has ranks.
            WorkerDied: they did not all come in time.
        """
        for role in roles:
            check_world(self.launch, role.count)
        loop = asyncio.get_running_loop()
        self.death: asyncio.Future[Any] = loop.create_future()
        self.death.add_done_callback(lambda future: future.cancelled() or future.exception())
        with suppress(ValueError, RuntimeError):  # of a thread beside the main one
            loop.add_signal_handler(signal.SIGTERM, self._told_to_end)
        await loop.run_in_executor(None, self._meet)

    def _meet(self) -> None:
        assert self.launch
        gate = listen(self.launch, self.run_dir)

        end = time.monotonic() + MEET_S
        try:
            while len(self.peers) < self.launch.world - 1:
                connection, said = gate.admitted.get(timeout=max(end - time.monotonic(), 0.001))
                connection.settimeout(self.waits.deadline_s)
                rank = int(said["rank"])
                thread = DaemonThreads(1, f"rank-{rank}")
                self.peers[rank] = Peer(
                    rank,
                    said["pid"],
                    said["node"],
                    connection,
                    thread,
                )
        except queue.Empty:
            raise WorkerDied(
                f"{len(self.peers) + 1} of {self.launch.world} processes of torchrun came within "
                f"{MEET_S:g} s.\n  look at:  the output of the others; run_dir={self.run_dir} "
                "must be a folder that all nodes share"
            ) from None
        finally:
            gate.stop()
            (self.run_dir / FILE).unlink(missing_ok=True)

    def _told_to_end(self) -> None:
        """Torchrun ends all processes where one has ended."""
        self._die(WorkerDied("torchrun ends the run: another of its processes has ended."))

    def _die(self, error: WorkerDied) -> WorkerDied:
        if not self.death.done():
            self.death.set_exception(error)
        return error

    def spawn(self, role: str, index: int, build: str, spec: Any, python: str = "") -> Handle:
        if not index:
            return super().spawn(role, index, build, spec, python)
        handle = Handle(role, index, self.peers[index])
        self.starting[handle] = asyncio.ensure_future(self._ask(handle, "start", (build, spec)))
        return handle

    async def locate(self, handles: Sequence[Handle], ranks: Sequence[Rank]) -> list[Rank]:
        assert self.launch
        started = [handle for handle in handles if handle in self.starting]
        if not started:
            return list(ranks)
        await self._gather(started, "start", [self.starting.pop(handle) for handle in started])

        port, self.kept = keep_port(self.launch.host)
        rendezvous = f"{self.launch.host}:{port}"
        return [replace(rank, rendezvous=rendezvous, node=self.launch.host) for rank in ranks]

    async def each(
        self,
        handles: Sequence[Handle],
        method: str,
        arguments: Iterable[tuple[Any, ...]],
        *,
        aside: bool = False,
    ) -> list[Any]:
        calls = [
            asyncio.ensure_future(self._ask(handle, method, args))
            for handle, args in zip(handles, arguments, strict=True)
        ]

        return await self._gather(handles, method, calls)

    async def _gather(
        self, handles: Sequence[Handle], method: str, calls: Sequence[asyncio.Future[Any]]
    ) -> list[Any]:
        indices = [handle.index for handle in handles]
        return await self.waits.gather(
            handles[0].role,
            method,
            indices,
            calls,
            self.death,
        )

    async def _ask(self, handle: Handle, method: str, args: tuple[Any, ...]) -> Any:
        """Call a worker, here or in its process.

        Raises:
            WorkerDied: its process ended.
            WaitTimeout: it did not answer in time.
            CouplerError: the worker raised.
        """
        if not isinstance(handle.of, Peer):
            return await self._call(handle, getattr(handle.of, method), args, False)

        peer, loop = handle.of, asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(
                peer.thread,
                peer.call,
                handle.role,
                method,
                args,
            )
        except TimeoutError:
            raise WaitTimeout(
                f"{handle.role} {peer} did not answer {method} within "
                f"{self.waits.deadline_s:g} s.\n  the limit is:  waits.deadline_s"
            ) from None
        except (OSError, ValueError) as error:
            raise self._die(
                WorkerDied(f"{handle.role} {peer} died in {method}: {error}.")
            ) from None
        if isinstance(answer, Failure):
            raise answer.error(f"{handle.role} {peer}", method, None, [])
        return answer

    async def reads(self) -> set[str]:
        handles = [Handle("policy", rank, peer) for rank, peer in self.peers.items()]
        found = await asyncio.gather(*(self._ask(handle, "reads", ()) for handle in handles))
        return {key for keys in found for key in keys}

    def close(self) -> None:
        """Close the workers of every process, each in a bounded time."""
        leaving = [
            peer.thread.submit(peer.call, "", "close", ())
            for peer in self.peers.values()
            if not self._is_dead()
        ]
        super().close()
        for left in leaving:
            with suppress(Exception):
                left.result(LEAVE_S)
        for peer in self.peers.values():
            peer.connection.close()

    def _is_dead(self) -> bool:
        return hasattr(self, "death") and self.death.done()
