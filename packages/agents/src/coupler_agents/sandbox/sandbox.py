"""Hand out interpreters of this machine's sandbox."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence

from coupler_agents.sandbox.interpreter import Interpreter
from coupler_agents.sandbox.limits import SandboxLimits
from coupler_agents.sandbox.output import Output
from coupler_agents.sandbox.parent import Parent, why_none
from coupler_agents.sandbox.ran import SandboxFailed

TRIES = 3


class Sandbox:
    """Interpreters in bubblewrap, each a fork of a process that has started before.

    An interpreter has files, processes and a network of its own, so that it sees no
    other one. Where the kernel allows no namespaces inside bubblewrap, each interpreter
    has a bubblewrap of its own, which takes longer.

    Attributes:
        separate: whether an interpreter has namespaces of its own inside bubblewrap.

    Example:
        ``await sandbox.start()``, ``python = await sandbox.interpreter()``, and then
        ``await python.call("1 + 1", timeout_s=5.0)``
    """

    def __init__(self, limits: SandboxLimits, *, separate: bool = True) -> None:
        self.limits, self.separate = limits, separate
        self.parent: Parent | None = None

    async def start(self) -> None:
        """Start the process that interpreters are forks of.

        Raises:
            SandboxFailed: there is no sandbox here. The text says why.
        """
        if why := why_none():
            raise SandboxFailed(f"the sandbox of programs cannot be started: {why}")
        self.places = asyncio.Semaphore(self.limits.interpreters)
        self.starting = asyncio.Lock()
        self.parent = await self._started()
        self.separate = self.parent.separate

    async def interpreter(self, *, fetch: Sequence[str] = (), apart: bool = False) -> Interpreter:
        """Return a fresh interpreter.

        Args:
            fetch: names of files to hand out at its end.
            apart: whether errors have a stream of their own.

        Raises:
            SandboxFailed: none could be made.
        """
        await self.places.acquire()
        try:
            return await self._forked(fetch, apart)
        except BaseException:
            self.places.release()
            raise

    async def close(self) -> None:
        """End all interpreters."""
        parent, self.parent = self.parent, None
        if parent:
            await parent.close()

    async def _forked(self, fetch: Sequence[str], apart: bool) -> Interpreter:
        for _ in range(TRIES):
            parent = await self._for_one()
            interpreter, ends = self._made(parent, apart)
            try:
                await parent.fork(ends, fetch)
                return interpreter
            except BaseException as error:
                await interpreter.drop()
                # The process has ended, and another one is started.
                if not isinstance(error, OSError):
                    raise
            finally:
                for end in set(ends):
                    os.close(end)

        raise SandboxFailed(f"the sandbox of programs ended {TRIES} times before it was used.")

    def _made(self, parent: Parent, apart: bool) -> tuple[Interpreter, list[int]]:
        """Return an interpreter, and the ends of its sockets and pipes to give away.

        Raises:
            SandboxFailed: this process may open no more.
        """
        opened: list[int] = []
        try:
            for _ in range(2):
                opened += [end.detach() for end in socket.socketpair()]
            for _ in range(1 + apart):
                opened += os.pipe()
        except OSError as error:
            for descriptor in opened:
                os.close(descriptor)
            raise SandboxFailed(
                f"an interpreter could not be started: {error}.\n"
                "  try:  a higher ulimit -n, or a lower environment.sandbox_interpreters"
            ) from None

        life, keeper, talk, program, *pipes = opened
        interpreter = Interpreter(
            socket.socket(fileno=life),
            socket.socket(fileno=talk),
            tuple(Output(reading, self.limits.output_bytes) for reading in pipes[::2]),
            lambda: self._released(parent),
        )
        # Without a pipe of their own, errors go where the output goes.
        return interpreter, [keeper, program, pipes[1], pipes[-1]]

    async def _for_one(self) -> Parent:
        """Return the process to fork the next interpreter from."""
        async with self.starting:
            if self.parent and not self.parent.alive():
                await self.parent.close()
                self.parent = None
            if not self.parent:
                self.parent = await self._started()
            parent = self.parent
            if not parent.separate:
                self.parent = None
            return parent

    async def _started(self) -> Parent:
        parent = Parent(self.limits, separate=self.separate)
        await parent.ready()
        return parent

    async def _released(self, parent: Parent) -> None:
        self.places.release()
        if not parent.separate:
            await parent.close()
