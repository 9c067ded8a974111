"""Admit peers at a listening socket, and drop strangers in bounded time.

The side that listens says a nonce first. The peer answers with the length of its
greeting (8 bytes, big endian), a proof (HMAC-SHA256 of nonce and greeting under the
token) and the greeting, which is a JSON object. The listener answers with a proof of
its own. So the token never travels, a proof is worth nothing for another connection,
and nothing is parsed before the proof was found right.
"""

from __future__ import annotations

import errno
import hmac
import json
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from coupler.system.log import get_logger

log = get_logger(__name__)

LENGTH = struct.Struct(">Q")
PROOF_BYTES = 32
HEAD_BYTES = LENGTH.size + PROOF_BYTES
MAX_GREETING = 4096
# a greeting may take so long, all of it
GREETING_S = 10.0
# connections that have not greeted yet, of which the oldest goes when another comes
MAX_GUESTS = 256
# a younger connection is not dropped for another, which waits in the backlog
MIN_AGE_S = 0.2
# connections that were admitted and that nobody has taken yet
MAX_ADMITTED = 4096
BACKLOG = 1024
# a peer that was dropped in a flood comes again so often
TRIES = 5
RETRY_S = 0.1

Admitted = tuple[socket.socket, dict[str, Any]]


@dataclass(slots=True, eq=False)
class Guest:
    """A connection that has not shown yet who it is."""

    connection: socket.socket
    nonce: bytes
    came: float = field(default_factory=time.monotonic)
    said: bytearray = field(default_factory=bytearray)

    @property
    def length(self) -> int:
        """Bytes of the greeting, or 0 until the guest said how many there are."""
        return LENGTH.unpack_from(self.said)[0] if len(self.said) >= LENGTH.size else 0


class Gate:
    """Accepts all the time, in a thread, so that no stranger fills the backlog.

    Attributes:
        admitted: peers that knew the token, each with its greeting.
        dropped: how many connections were hung up on.
    """

    def __init__(self, server: socket.socket, token: str) -> None:
        self.server, self.token = server, token
        self.admitted: queue.SimpleQueue[Admitted] = queue.SimpleQueue()
        self.dropped = 0
        self.guests: dict[socket.socket, Guest] = {}
        self.stopping = False

        server.setblocking(False)
        self.woken, self.waker = socket.socketpair()
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.woken, selectors.EVENT_READ)
        self.selector.register(server, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="gate", daemon=True).start()

    def stop(self) -> None:
        """End the thread, which closes the listening socket and every guest."""
        self.stopping = True
        with suppress(OSError):
            self.waker.send(b"x")

    def _serve(self) -> None:
        while not self.stopping:
            ready: list[Any] = [key.fileobj for key, _ in self.selector.select(self._patience())]
            # those that are here come before those that knock
            for guest in [self.guests[each] for each in ready if each in self.guests]:
                self._hear(guest)
            self._drop_late()
            if self.server in ready or self._server_waits:
                self._accept()

        for each in (*self.guests, self.server, self.woken, self.waker):
            each.close()
        while not self.admitted.empty():
            self.admitted.get_nowait()[0].close()
        self.selector.close()

    def _patience(self) -> float | None:
        if self._server_waits:
            return MIN_AGE_S / 4
        oldest = next(iter(self.guests.values()), None)
        return max(oldest.came + GREETING_S - time.monotonic(), 0.0) if oldest else None

    @property
    def _server_waits(self) -> bool:
        """Return whether the listening socket is out of the selector."""
        return self.server not in self.selector.get_map()

    def _listen(self, wanted: bool) -> None:
        if wanted and self._server_waits:
            self.selector.register(self.server, selectors.EVENT_READ)
        elif not wanted and not self._server_waits:
            self.selector.unregister(self.server)

    def _accept(self) -> None:
        """Let in who is at the door, as far as there is room."""
        for _ in range(MAX_GUESTS):
            if not self._make_room():
                self._listen(False)
                return

            try:
                connection, _ = self.server.accept()
            except BlockingIOError:
                break
            except OSError as error:
                # no file descriptor is left, or the peer went before it came
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    if self.guests:
                        self._drop(next(iter(self.guests.values())))
                    self._listen(False)
                    return
                continue

            self._welcome(connection)
        self._listen(True)

    def _make_room(self) -> bool:
        if len(self.guests) < MAX_GUESTS:
            return True
        oldest = next(iter(self.guests.values()))
        if time.monotonic() - oldest.came < MIN_AGE_S:
            return False
        self._drop(oldest)
        return True

    def _welcome(self, connection: socket.socket) -> None:
        guest = Guest(connection, secrets.token_bytes(PROOF_BYTES))
        self.guests[connection] = guest
        try:
            connection.setblocking(False)
            self.selector.register(connection, selectors.EVENT_READ)
            connection.send(guest.nonce)
        except OSError:
            self._drop(guest)

    def _hear(self, guest: Guest) -> None:
        """Read what a guest says, and decide once all of it is there."""
        wanted = HEAD_BYTES + (guest.length if len(guest.said) >= HEAD_BYTES else 0)
        try:
            got = guest.connection.recv(wanted - len(guest.said))
        except BlockingIOError:
            return
        except OSError:
            got = b""
        guest.said += got

        if not got or guest.length > MAX_GREETING:
            self._drop(guest)
        elif len(guest.said) == HEAD_BYTES + guest.length:
            self._judge(guest)

    def _judge(self, guest: Guest) -> None:
        proof = bytes(guest.said[LENGTH.size : HEAD_BYTES])
        greeting = bytes(guest.said[HEAD_BYTES:])

        if not hmac.compare_digest(proof, proof_of(self.token, guest.nonce, greeting)):
            self._drop(guest)
            return

        try:
            said = json.loads(greeting)
            guest.connection.send(proof_of(self.token, proof, b"welcome"))
        except (ValueError, RecursionError, OSError):
            said = None
        if not isinstance(said, dict) or self.admitted.qsize() >= MAX_ADMITTED:
            self._drop(guest)
            return

        del self.guests[guest.connection]
        self.selector.unregister(guest.connection)
        self.admitted.put((guest.connection, said))

    def _drop_late(self) -> None:
        limit = time.monotonic() - GREETING_S
        for guest in list(self.guests.values()):
            if guest.came > limit:
                break
            self._drop(guest)

    def _drop(self, guest: Guest) -> None:
        self.dropped += 1
        del self.guests[guest.connection]
        with suppress(KeyError, ValueError):
            self.selector.unregister(guest.connection)
        guest.connection.close()

        if self.dropped == 1:
            host, port = self.server.getsockname()[:2]
            log.warning(
                f"a stranger connected to {host}:{port}, where a run listens, and was hung "
                "up on. More of them are counted and not shown."
            )


def greet(host: str, port: int, token: str, said: dict[str, Any], seconds: float) -> socket.socket:
    """Connect to a :class:`Gate`, and return the connection once it let us in.

    Raises:
        TimeoutError: it did not within ``seconds``.
        ConnectionError: it hung up, as it does on who does not know the token.
    """
    end = time.monotonic() + seconds

    for attempt in range(1, TRIES + 1):
        try:
            return _greet(host, port, token, said, end)
        except ConnectionError:
            # a gate that is flooded may drop us with the strangers
            if attempt == TRIES or time.monotonic() + attempt * RETRY_S > end:
                raise
            time.sleep(attempt * RETRY_S)
    raise AssertionError


def _greet(host: str, port: int, token: str, said: dict[str, Any], end: float) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=_rest(end))
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        greeting = json.dumps(said).encode()
        proof = proof_of(token, _read(connection, PROOF_BYTES, end), greeting)
        connection.sendall(LENGTH.pack(len(greeting)) + proof + greeting)

        answer = _read(connection, PROOF_BYTES, end)
        if not hmac.compare_digest(answer, proof_of(token, proof, b"welcome")):
            raise ConnectionError("it does not know the token of this run")
    except BaseException:
        connection.close()
        raise
    return connection


def proof_of(token: str, nonce: bytes, text: bytes) -> bytes:
    """Return a proof, [PROOF_BYTES], that its sender knows ``token``."""
    return hmac.digest(token.encode(), nonce + text, "sha256")


def _read(connection: socket.socket, count: int, end: float) -> bytes:
    data = b""
    while len(data) < count:
        connection.settimeout(_rest(end))
        got = connection.recv(count - len(data))
        if not got:
            raise ConnectionError("it closed the connection")
        data += got
    return data


def _rest(end: float) -> float:
    return max(end - time.monotonic(), 0.001)
