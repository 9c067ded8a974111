"""Keep the client of a stream waiting while its turn is sampled.

The events of a turn are sent when all of it has been sampled, which may take longer
than a client's read timeout. Pings in between are bytes that every client reads over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web

COMMENT = b": ping\n\n"
END_SECONDS = 5.0  # for a cancelled turn to end
T = TypeVar("T")


@dataclass(slots=True)
class Stream:
    """The response to one request for a stream.

    Attributes:
        ping: the event that says nothing, in the dialect of the request.
        every_seconds: time without an answer until the next ping.
        send_seconds: time for the client to take what is sent.
        response: what the first ping began. Until then an error has its own status.
    """

    request: web.BaseRequest
    ping: bytes
    every_seconds: float
    send_seconds: float
    response: web.StreamResponse | None = None

    async def pinging(self, turn: Coroutine[Any, Any, T]) -> T:
        """Return what a turn does, and send pings until then."""
        task = asyncio.create_task(turn)

        try:
            while not (await asyncio.wait({task}, timeout=self.every_seconds))[0]:
                await self.send([self.ping])
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=END_SECONDS)

    async def send(self, events: Iterable[bytes], *, last: bool = False) -> None:
        """Send events, the first ones behind the status and headers.

        Raises:
            ConnectionError: the client went away, or does not take them.
        """
        try:
            async with asyncio.timeout(self.send_seconds):
                if not self.response:
                    self.response = web.StreamResponse()
                    self.response.content_type = "text/event-stream"
                    await self.response.prepare(self.request)

                await self.response.write(b"".join(events))
                if last:
                    await self.response.write_eof()
        except TimeoutError:
            if self.request.transport:
                self.request.transport.abort()
            raise ConnectionError("the client does not read its stream") from None
