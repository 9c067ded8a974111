"""Carry messages of JSON over a socket, each after its length."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

LENGTH = struct.Struct(">I")


class Wire:
    """One end of a connected socket."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.writer: asyncio.StreamWriter | None = None

    def send(self, message: Any) -> None:
        """Send one message, and wait until it is on its way."""
        self.end.sendall(packed(message))

    def receive(self) -> Any:
        """Wait for one message, and return None if the other side is gone."""
        head = self._exactly(LENGTH.size)
        if head is None:
            return None
        body = self._exactly(LENGTH.unpack(head)[0])
        return None if body is None else json.loads(body)

    def _exactly(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            part = b""
            # A side that ends before it has read all resets the connection.
            with suppress(ConnectionResetError):
                part = self.end.recv(count - len(parts))
            if not part:
                return None
            parts += part
        return bytes(parts)

    def close(self) -> None:
        """Close the socket. Its event loop may have ended."""
        if self.writer is not None:
            with suppress(RuntimeError):
                self.writer.transport.abort()
        self.end.close()

    async def streams(self) -> tuple[Callable[[], Awaitable[Any]], Callable[[Any], None]]:
        """Return a function that waits for the next message, and one that sends.

        The first returns None when the other side is gone.
        """
        reader, self.writer = await asyncio.open_connection(sock=self.end)
        writer = self.writer

        async def receive() -> Any:
            try:
                head = await reader.readexactly(LENGTH.size)
                return json.loads(await reader.readexactly(LENGTH.unpack(head)[0]))
            except (asyncio.IncompleteReadError, ConnectionError):
                return None

        return receive, lambda message: writer.write(packed(message))


def packed(message: Any) -> bytes:
    """Return the bytes of a message."""
    body = json.dumps(message, default=plain).encode()
    return LENGTH.pack(len(body)) + body


def plain(value: Any) -> Any:
    """Turn a number of another library into one of Python."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no form in JSON")
