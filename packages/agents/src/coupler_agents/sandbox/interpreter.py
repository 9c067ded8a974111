"""Speak with one interpreter: requests, answers, output, and how it ended."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from coupler_agents.sandbox.output import Output
from coupler_agents.sandbox.ran import Ran, SandboxFailed, clean

HEADER = struct.Struct(">I")
MAX_ANSWER = 1 << 20
MAX_ENDING = 16 << 20
# The keeper says how an interpreter ended within this time.
END_S = 5.0
# Words for the keeper.
STOP = b"s"
GO_ON = b"c"


@dataclass(frozen=True, slots=True)
class Answer:
    """Hold how a call ended.

    Attributes:
        output: what it printed, errors among it.
        value: the value of its last expression, or nothing.
        error: its traceback, or nothing.
    """

    output: str
    value: str
    error: str

    @property
    def text(self) -> str:
        """The call as an interactive interpreter shows it."""
        parts = (part for part in (self.output, self.value, self.error) if part)
        return "\n".join(part.rstrip("\n") for part in parts)


class InterpreterLost(Exception):
    """An interpreter has ended, with all that it held. The text says why.

    ``output`` is what the call printed until then.
    """

    def __init__(self, why: str, output: str, *, timed_out: bool = False) -> None:
        super().__init__(why)
        self.output, self.timed_out = output, timed_out


class Interpreter:
    """Own an interpreter: for one program, or for all calls of an episode.

    Args:
        release: what is called when it has ended.
    """

    def __init__(
        self,
        life: socket.socket,
        talk: socket.socket,
        outputs: tuple[Output, ...],
        release: Callable[[], Awaitable[None]],
    ) -> None:
        self.life, self.talk, self.outputs, self.release = life, talk, outputs, release
        self.loop = asyncio.get_running_loop()
        for end in (life, talk):
            end.setblocking(False)

        self.calls = 0
        self.ending: asyncio.Task[dict[str, Any]] = asyncio.create_task(self._until_end())
        self.closed = False

    async def call(
        self,
        code: str,
        timeout_s: float,
        files: Mapping[str, str] | None = None,
    ) -> Answer:
        """Run code. What earlier calls defined is there.

        Args:
            files: texts by name, written before the first call.

        Raises:
            InterpreterLost: it took too long, or the interpreter ended.
            SandboxFailed: the interpreter could not be made.
        """
        request = {"code": clean(code), "files": dict(files or {})}
        answer = asyncio.create_task(self._exchange(request))

        try:
            self._tell(GO_ON)
            await asyncio.wait(
                {answer, self.ending},
                timeout=timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if answer.done() and not answer.exception():
                value, error = answer.result()
                self.calls += 1
                self._tell(STOP)
                return Answer(clean(self._output()), clean(value), clean(error))
            raise await self._lost(answer, timeout_s)
        except BaseException:
            await _cancelled(answer)
            await self.close()
            raise

    async def run(self, code: str, timeout_s: float, files: Mapping[str, str], stdin: str) -> Ran:
        """Run one program to its end.

        Raises:
            SandboxFailed: the interpreter could not be made.
        """
        request = {
            "code": clean(code),
            "files": dict(files),
            "stdin": stdin,
            "script": True,
        }
        sent = asyncio.create_task(self._send(request))
        try:
            done, _ = await asyncio.wait({self.ending}, timeout=timeout_s)
            if not done:
                self.life.shutdown(socket.SHUT_WR)
            ending = await self._ended("could not be ended")
            stdout, stderr = (clean(output.taken()) for output in self.outputs)
        finally:
            await _cancelled(sent)
            await self.close()

        how, files_out = str(ending.get("how", "")), ending.get("files", {})
        return Ran(
            stdout,
            stderr,
            code=int(ending.get("code", 137)),
            files={name: base64.b64decode(data) for name, data in files_out.items()},
            timed_out=not done,
            ended=how if done else "",
        )

    async def close(self) -> None:
        """End the interpreter, and give its place to another one."""
        if not self.closed:
            await self.drop()
            await self.release()

    async def drop(self) -> None:
        """End the interpreter."""
        self.closed = True
        await _cancelled(self.ending)
        for output in self.outputs:
            output.close()
        self.talk.close()
        # The keeper sees this, and ends what is left.
        self.life.close()

    def _tell(self, word: bytes) -> None:
        """Have the keeper stop the program, or let it go on."""
        # A keeper that has ended is seen elsewhere.
        with suppress(OSError):
            self.life.send(word)

    def _output(self) -> bytes:
        return b"".join(output.taken() for output in self.outputs)

    async def _lost(self, answer: asyncio.Task[Any], timeout_s: float) -> InterpreterLost:
        """Return how the interpreter was lost, once that is known."""
        if not answer.done() and not self.ending.done():
            why = f"took longer than {timeout_s:g} seconds"
            return InterpreterLost(why, clean(self._output()), timed_out=True)
        if answer.done() and not isinstance(answer.exception(), OSError):
            return InterpreterLost("wrote into the socket of its answers", clean(self._output()))

        ending = await self._ended("closed the socket of its answers")
        code, how = int(ending.get("code", 137)), str(ending.get("how", ""))
        if not how and code > 128:
            how = f"was killed by signal {code - 128}"
        return InterpreterLost(how or f"exited with code {code}", clean(self._output()))

    async def _ended(self, otherwise: str) -> dict[str, Any]:
        """Wait for the keeper's word. It has said nothing where ``otherwise`` is true.

        Raises:
            SandboxFailed: the interpreter could not be made.
        """
        done, _ = await asyncio.wait({self.ending}, timeout=END_S)
        ending = self.ending.result() if done else {"how": otherwise}
        if "failed" in ending:
            raise SandboxFailed(f"an interpreter could not be started: {ending['failed']}")
        return ending

    async def _until_end(self) -> dict[str, Any]:
        data = bytearray()
        # The socket is reset where the keeper ended before it read all words.
        with suppress(ConnectionError):
            while chunk := await self.loop.sock_recv(self.life, 1 << 16):
                data += chunk
                if len(data) > MAX_ENDING:
                    break
        # Where the whole sandbox was ended, nobody is left to say anything.
        return json.loads(data) if data else {"how": "was ended with the sandbox"}

    async def _exchange(self, request: dict[str, Any]) -> tuple[str, str]:
        """Send a request, and read its answer.

        Raises:
            ValueError: what came is no answer.
            OSError: nothing came.
        """
        await self._send(request)
        (size,) = HEADER.unpack(await self._exactly(HEADER.size))
        if size > MAX_ANSWER:
            raise ValueError("an answer is too long")

        answer = json.loads(await self._exactly(size))
        value, error = answer["value"], answer["error"]
        if (
            answer["number"] != self.calls
            or not isinstance(value, str)
            or not isinstance(error, str)
        ):
            raise ValueError("an answer has no value and error")
        return value, error

    async def _send(self, request: dict[str, Any]) -> None:
        data = json.dumps(request).encode()
        await self.loop.sock_sendall(self.talk, HEADER.pack(len(data)) + data)

    async def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = await self.loop.sock_recv(self.talk, size - len(data))
            if not chunk:
                raise ConnectionError("the interpreter closed the socket of its answers")
            data += chunk
        return bytes(data)


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task, and wait until the event loop has forgotten its socket."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        # It is seen here, so that nobody is told that it never was.
        task.exception()
