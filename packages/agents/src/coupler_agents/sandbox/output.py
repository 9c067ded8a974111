"""Read what a program writes, without letting it fill memory or the event loop."""

from __future__ import annotations

import asyncio
import os

CHUNK = 1 << 16
LAST = 16
# Above its limit, a stream is read a chunk at a time, this many seconds apart.
PAUSE_S = 0.002


class Output:
    """Keep the first bytes of a stream, and read the rest away.

    Args:
        descriptor: the end to read, which this object owns.
        limit: bytes to keep between two calls of :meth:`taken`.
    """

    def __init__(self, descriptor: int, limit: int) -> None:
        self.descriptor, self.limit = descriptor, limit
        self.kept, self.left_out = bytearray(), 0
        self.loop = asyncio.get_running_loop()
        os.set_blocking(descriptor, False)
        self.open = True
        self._listen()

    def taken(self) -> bytes:
        """Return what came since the last call, and forget it."""
        for _ in range(LAST):
            if not self._read():
                break
        found, left_out = bytes(self.kept), self.left_out
        self.kept, self.left_out = bytearray(), 0
        return found + (f"\n... ({left_out} bytes more)\n".encode() if left_out else b"")

    def close(self) -> None:
        """Read no more."""
        if self.open:
            self.open = False
            self.loop.remove_reader(self.descriptor)
            os.close(self.descriptor)

    def _listen(self) -> None:
        if self.open:
            self.loop.add_reader(self.descriptor, self._arrived)

    def _arrived(self) -> None:
        data = self._read()
        if data == b"" or self.left_out:
            self.loop.remove_reader(self.descriptor)
        if data and self.left_out:
            self.loop.call_later(PAUSE_S, self._listen)

    def _read(self) -> bytes | None:
        """Read a chunk: nothing at the end of the stream, None where none has come."""
        if not self.open:
            return None
        try:
            data = os.read(self.descriptor, CHUNK)
        except BlockingIOError:
            return None

        room = self.limit - len(self.kept)
        self.kept += data[:room]
        self.left_out += max(0, len(data) - room)
        return data
