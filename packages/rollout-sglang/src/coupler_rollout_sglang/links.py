"""Reach an engine: over a socket to a process that holds it, or over HTTP.

Both take the calls of SGLang's HTTP interface, with the same bodies.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from itertools import count
from typing import Any

import aiohttp

from coupler import errors
from coupler.engine_kit.inference.gate import Gate
from coupler.errors import CouplerError, ReplicaDied
from coupler_rollout_sglang.messages import DIED_AT_START
from coupler_rollout_sglang.wire import Wire

KEY_VARIABLE = "COUPLER_SGLANG_KEY"
"""The environment variable with the key of a server that runs already."""
LOOPBACK = "127.0.0.1"
SOON = aiohttp.ClientTimeout(total=30)
# Whoever waits looks at whether the server lives meanwhile.
WITHOUT_LIMIT = aiohttp.ClientTimeout(total=0)
START_S = 1800.0
"""Seconds within which a server answers, with all that it compiles first."""


class EngineEnded(Exception):
    """Say that the engine cannot be reached any more."""


class Link(ABC):
    """A way to one engine."""

    @abstractmethod
    async def ready(self) -> None:
        """Let the engine take its device, and wait until it is there.

        Raises:
            CouplerError: it did not start, or does not answer in time.
            ReplicaDied: one of its processes ended meanwhile.
        """

    @abstractmethod
    async def call(self, name: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Make one call, and return its status and answer.

        Raises:
            EngineEnded: the engine ended before the answer came.
        """

    @abstractmethod
    async def check(self) -> None:
        """Return if the engine lives.

        Raises:
            EngineEnded: it does not.
        """

    @abstractmethod
    def pids(self) -> set[int]:
        """Return the process that was started for this link, if there is one."""

    @abstractmethod
    def close(self) -> None:
        """End what was started for this link."""


class Process:
    """A process that holds an engine, with all that it starts in turn."""

    def __init__(self, asked: dict[str, Any]) -> None:
        """Start it, and tell it what to start."""
        # Short, since the names of sockets may not be long. It is ours alone.
        self.folder = tempfile.mkdtemp(prefix="sgl-")
        self.gate = Gate(self.folder)
        self.closed = False
        ours, theirs = socket.socketpair()

        environment = dict(os.environ)
        environment.pop(KEY_VARIABLE, None)
        self.of = subprocess.Popen(
            [sys.executable, "-m", "coupler_rollout_sglang.host", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )
        theirs.close()

        self.wire = Wire(ours)
        place = {"folder": self.folder, "gate": self.gate.path}
        self.wire.send({**place, **asked, "parent": os.getpid()})

    def started(self) -> dict[str, Any]:
        """Wait for what the process says of the engine.

        Raises:
            CouplerError: it did not start. Its own log lines say why.
            ReplicaDied: one of its processes ended meanwhile.
        """
        facts = self.wire.receive()
        if facts is None:
            self.close()
            raise ReplicaDied(DIED_AT_START)
        if "error" in facts:
            self.close()
            raise did_not_start(*facts["error"])
        return facts

    @property
    def lives(self) -> bool:
        return self.of.poll() is None

    def close(self) -> None:
        """Kill the process and all that it started, once."""
        if self.closed:
            return
        self.closed = True

        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.of.pid, signal.SIGKILL)
        self.of.wait()
        self.wire.close()
        self.gate.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def did_not_start(kind: str, text: str) -> Exception:
    """Return the error of an engine that said why it did not start."""
    if kind != "start":
        return vars(errors)[kind](text)
    first = text.splitlines()[0]
    if "memory" in first.lower():
        return MemoryError(f"SGLang did not start: {first}")
    return CouplerError(
        f"SGLang did not start: {first}\n  look at:  its own lines above, and rollout.extra_args"
    )


class PrivateLink(Link):
    """A socket to a process that holds the engine."""

    def __init__(self, asked: dict[str, Any]) -> None:
        """Start the engine, whose schedulers wait for :meth:`ready`."""
        self.process = Process({**asked, "serve": None})
        self.gate = self.process.gate
        self.names = count()
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self.write: Callable[[Any], None] | None = None
        self.reader: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        self.gate.open()
        await asyncio.to_thread(self.process.started)

    async def call(self, name: str, body: dict[str, Any]) -> tuple[int, Any]:
        if self.write is None:
            receive, self.write = await self.process.wire.streams()
            self.reader = asyncio.create_task(self._read(receive))
        await self.check()

        number = next(self.names)
        answer = self.waiting[number] = asyncio.get_running_loop().create_future()
        self.write({"id": number, "call": name, "body": body})
        try:
            return await answer
        finally:
            del self.waiting[number]

    async def _read(self, receive: Callable[[], Awaitable[Any]]) -> None:
        """Hand on answers, and fail what waits when the engine ends."""
        while (message := await receive()) is not None:
            waiting = self.waiting.get(message["id"])
            if waiting is not None and not waiting.done():
                waiting.set_result((message["status"], message["answer"]))

        for waiting in self.waiting.values():
            if not waiting.done():
                waiting.set_exception(EngineEnded())

    async def check(self) -> None:
        if not self.process.lives or (self.reader is not None and self.reader.done()):
            raise EngineEnded

    def pids(self) -> set[int]:
        return {self.process.of.pid}

    def close(self) -> None:
        self.process.close()
        if self.reader is not None:
            # Its event loop may have ended.
            with suppress(RuntimeError):
                self.reader.cancel()


class HttpLink(Link):
    """HTTP to SGLang's server, one that we start or one that runs already."""

    def __init__(self, url: str, asked: dict[str, Any]) -> None:
        """Start a server unless ``url`` names one."""
        self.session: aiohttp.ClientSession | None = None
        self.process: Process | None = None
        if url:
            self.url, self.key = url, os.environ.get(KEY_VARIABLE, "")
            return

        self.key, port = secrets.token_urlsafe(32), free_port()
        self.url = f"http://{LOOPBACK}:{port}"
        serve = {"host": LOOPBACK, "port": port, "api_key": self.key, "admin_api_key": self.key}
        self.process = Process({**asked, "serve": serve, "gate": ""})

    async def call(self, name: str, body: dict[str, Any]) -> tuple[int, Any]:
        try:
            async with self._session().post(f"{self.url}/{name}", json=body) as response:
                if response.content_type == "application/json":
                    return response.status, await response.json()
                return response.status, {"message": await response.text()}
        except aiohttp.ClientError as error:
            raise EngineEnded(str(error)) from error

    async def check(self) -> None:
        if self.process is not None and not self.process.lives:
            raise EngineEnded
        await self._status()

    async def _status(self) -> int:
        """Return the status of a small request. Any one means that the server lives.

        Raises:
            EngineEnded: there is no answer.
        """
        try:
            async with self._session().get(f"{self.url}/model_info", timeout=SOON) as response:
                return response.status
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineEnded(str(error)) from error

    def _session(self) -> aiohttp.ClientSession:
        if self.session is None:
            self.session = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
                timeout=WITHOUT_LIMIT,
                connector=aiohttp.TCPConnector(limit=0),
            )
        return self.session

    async def ready(self) -> None:
        if self.process is not None:
            await asyncio.to_thread(self.process.started)
        until = time.monotonic() + (START_S if self.process else 10.0)
        while time.monotonic() < until:
            if self.process is not None and not self.process.lives:
                self.process.close()
                raise ReplicaDied(DIED_AT_START)
            with suppress(EngineEnded):
                if await self._status() in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                    raise CouplerError(
                        f"the SGLang server at {self.url} takes another key.\n"
                        f"  set:  the environment variable {KEY_VARIABLE} to its key"
                    )
                return
            await asyncio.sleep(0.2)

        raise CouplerError(
            f"no SGLang server answers at {self.url}.\n  look at:  rollout.server, and that it runs"
        )

    def pids(self) -> set[int]:
        return {self.process.of.pid} if self.process is not None else set()

    def close(self) -> None:
        if self.process is not None:
            self.process.close()
        if self.session is not None:
            # The first step closes every connection. The rest would wait for their ends
            # in an event loop that may have ended.
            closing = self.session.close()
            with suppress(StopIteration):
                closing.send(None)
            closing.close()


def free_port() -> int:
    """Return a port of the loopback that the operating system has free."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]
