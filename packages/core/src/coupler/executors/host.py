"""Host: one worker in a process of its own.

It runs in whatever interpreter the role has, and imports no Ray.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import traceback
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coupler import errors
from coupler.engine_kit.rendezvous import keep_port
from coupler.errors import CouplerError, WorkerFailed
from coupler.interfaces import open_transport
from coupler.system.imports import resolve
from coupler.system.plain import RECEIVED
from coupler.system.processes import Process, die_with_parent


@dataclass(frozen=True, slots=True)
class Place:
    """The place in which a host runs."""

    # its address
    node: str
    process: Process
    # kept for a server of this host
    port: int


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as text.

    Its class may not exist in the process that reads it.
    """

    kind: str
    text: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))

    def error(self, who: str, method: str, log: Path | None, tail: list[str]) -> CouplerError:
        """Return the exception to raise on the controller, with its text first.

        It has the same class if that is core's.

        Args:
            log: of its process, or None if that writes to our console.
            tail: last lines of the log, which end with the traceback. There are none
                where the log cannot be read.
        """
        where = f"  raised by:  {who} in {method}" + (f"; log: {log}" if log else "")
        kind = vars(errors).get(self.kind)
        if isinstance(kind, type) and issubclass(kind, CouplerError):
            return kind(f"{self.text}\n{where}")
        oom = "out of memory: " if self.kind == "MemoryError" else ""
        lines = tail or [f"  | {line}" for line in self.trace.rstrip().splitlines()]
        return WorkerFailed("\n".join([f"{oom}{self.kind}: {self.text}", where, *lines]))


class Host:
    """Holds one object.

    Its plain methods run on one thread, and its async ones on the event loop that
    serves calls. So a host answers while its worker computes: that it lives, and where
    it is stuck.
    """

    def __init__(self, log: Path, folder: Path, node: str) -> None:
        """Send everything that this process prints, C++ included, to ``log``.

        The process ends with the raylet that started it, also where it is stopped.
        """
        die_with_parent()
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log.open("a", buffering=1)

        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(self.log.fileno(), 1)
        os.dup2(self.log.fileno(), 2)
        sys.stdout = sys.stderr = self.log

        # relative paths of the configuration are the controller's
        if folder.is_dir():
            os.chdir(folder)

        self.node = node
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=log.stem)
        self.log.write(f"pid {os.getpid()} on node {node}, {sys.executable}\n")
        self.object: Any = None

    async def start(self, build: str, spec: Any) -> Place | Failure:
        """Create ``build(spec)``."""
        try:
            self.object = await self._in_thread(_build, build, spec)
        # third-party code, whose exceptions the controller raises
        except (Exception, SystemExit) as error:
            return self._failure(error)
        port, self.kept = keep_port(self.node)
        return Place(self.node, Process.of(os.getpid()), port)

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object, and return its result or a :class:`Failure`."""
        bound = getattr(self.object, method)
        try:
            if asyncio.iscoroutinefunction(bound):
                return await bound(*args)
            return await self._in_thread(bound, *args)
        # as above, and SystemExit would end the process without a word
        except (Exception, SystemExit) as error:
            return self._failure(error)

    async def stream(
        self, calls: list[tuple[str, tuple[Any, ...]]]
    ) -> AsyncIterator[tuple[int, Any]]:
        """Start all calls together, and yield number and answer of each as it ends."""
        numbered = [self._numbered(i, *call) for i, call in enumerate(calls)]
        for done in asyncio.as_completed(numbered):
            yield await done

    async def _numbered(self, number: int, method: str, args: tuple[Any, ...]) -> tuple[int, Any]:
        return number, await self.call(method, *args)

    async def reads(self) -> set[str]:
        """Return the full keys of the options that were read here."""
        return set(RECEIVED.keys)

    async def alive(self, seconds: float) -> None:
        """Answer after ``seconds``. An end of the process shows earlier."""
        await asyncio.sleep(seconds)

    async def dump(self) -> None:
        """Write the stacks of all threads to the log."""
        faulthandler.dump_traceback(self.log)

    async def close(self) -> None:
        """Release what would outlive the process, such as a rollout's own processes.

        An engine leaves its process group. The executor ends this process if that takes
        long.
        """
        try:
            if hasattr(self.object, "close"):
                await self._in_thread(self.object.close)
        finally:
            self.object = None
            open_transport.cache_clear()

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.thread, function, *args)

    def _failure(self, error: BaseException) -> Failure:
        failure = Failure.of(error)
        self.log.write(f"{failure.trace}\n")
        return failure


def _build(build: str, spec: Any) -> Any:
    return resolve(build)(spec)
