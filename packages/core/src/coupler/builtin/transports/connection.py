"""Connect receivers to a sender, through the gate that admits them.

On the wire, each way and after the greeting of :mod:`~coupler.system.gate`:
messages of a length (8 bytes, big endian), a JSON header, and as many bytes as it
announces.
"""

from __future__ import annotations

import json
import queue
import secrets
import selectors
import socket
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from coupler.errors import PeerLost, WaitTimeout
from coupler.interfaces import Endpoint, Rank, Transport, WeightUpdate
from coupler.system.gate import BACKLOG, GREETING_S, LENGTH, Gate, greet

MAX_HEADER = 1 << 24


class Listener:
    """Listens on a rank's node, or on loopback where it has none.

    Attributes:
        dropped: how many connections did not know the token, or were not of a transfer.
    """

    def __init__(self, rank: Rank, **facts: Any) -> None:
        server = socket.create_server((rank.node or "127.0.0.1", 0), backlog=BACKLOG)
        host, port = server.getsockname()
        self.host, self.token = host, secrets.token_hex(32)
        self.address = json.dumps({"host": host, "port": port, "token": self.token, **facts})

        # the thread of the gate knows nothing of the listener, so that it ends with it
        self.gate = Gate(server, self.token)
        weakref.finalize(self, self.gate.stop)

    @property
    def dropped(self) -> int:
        return self.gate.dropped

    @contextmanager
    def accepted(
        self, update: WeightUpdate
    ) -> Iterator[list[tuple[socket.socket, dict[str, Any]]]]:
        """Wait for every receiver of this update, and yield each with its greeting.

        Raises:
            WaitTimeout: they did not all come in time, or one took nothing for so long.
            PeerLost: one went away.
        """
        receivers: list[tuple[socket.socket, dict[str, Any]]] = []
        try:
            self._accept(update, receivers)
            yield receivers
        except TimeoutError:
            raise WaitTimeout(
                f"a receiver took no weights of version {update.version} for "
                f"{update.deadline_s:.0f} s.\n"
                "  look at:  the rollout's log, sync.deadline_s"
            ) from None
        except OSError as error:
            raise PeerLost(
                f"a receiver of weights version {update.version} went away: {error}."
            ) from None
        finally:
            for receiver, _ in receivers:
                receiver.close()

    def _accept(
        self, update: WeightUpdate, receivers: list[tuple[socket.socket, dict[str, Any]]]
    ) -> None:
        end, lost = time.monotonic() + update.deadline_s, 0

        # after a loss too, since who came late would wait for nothing
        while len(receivers) + lost < update.num_receivers:
            try:
                receiver, said = self.gate.admitted.get(timeout=max(end - time.monotonic(), 0.001))
            except queue.Empty:
                raise WaitTimeout(
                    f"waited {update.deadline_s:.0f} s for {update.num_receivers} receivers "
                    "of weights version "
                    f"{update.version}; {len(receivers)} came.\n  look at:  the rollout's "
                    "log, sync.deadline_s"
                ) from None

            # one of an update that ended
            if said.get("key") != list(update.key):
                receiver.close()
                continue

            if isinstance(off := said.get("off"), int):
                receiver.close()
                lost += off
                # the connection of the dead one may be among them
                receivers[:] = [each for each in receivers if is_open(each[0])]
                continue

            receiver.settimeout(update.deadline_s)
            receiver.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            receivers.append((receiver, said))

        if lost:
            raise ConnectionError("it died before all had come")


def is_open(receiver: socket.socket) -> bool:
    """Return whether the other side still holds this connection.

    A connection that it closed is closed here too.
    """
    with suppress(OSError):
        if not _readable([receiver], 0) or receiver.recv(1, socket.MSG_PEEK):
            return True
    receiver.close()
    return False


@contextmanager
def connected(address: str, update: WeightUpdate, **facts: Any) -> Iterator[socket.socket]:
    """Connect to the :class:`Listener` at ``address`` and greet it.

    Raises:
        WaitTimeout: nothing came from it within the update's deadline.
        PeerLost: it went away.
    """
    at = json.loads(address)
    said = {"key": update.key, **facts}
    try:
        with greet(at["host"], at["port"], at["token"], said, update.deadline_s) as sender:
            sender.settimeout(update.deadline_s)
            yield sender
    except TimeoutError:
        raise WaitTimeout(
            f"waited {update.deadline_s:.0f} s for weights of version {update.version} from "
            f"{at['host']}:{at['port']}.\n  look at:  the sender's log, sync.deadline_s"
        ) from None
    except OSError as error:
        raise PeerLost(
            f"the sender of weights version {update.version} went away: {error}."
        ) from None


class ConnectedTransport(Transport):
    """A transport whose sender waits for connections at a :class:`Listener`."""

    def __init__(self) -> None:
        # by address, one per engine of this process
        self.listeners: dict[str, Listener] = {}

    def bind(self, rank: Rank) -> Endpoint:
        """Listen on rank 0, which sends to everybody."""
        return Endpoint() if rank.index else self.listen(Listener(rank))

    def listen(self, listener: Listener) -> Endpoint:
        """Keep ``listener`` for the updates to come, and return where it is."""
        self.listeners[listener.address] = listener
        return Endpoint(listener.address)

    def call_off(self, update: WeightUpdate, num_receivers: int) -> None:
        """Tell every listener of this update how many of its receivers died."""
        for endpoint in update.endpoints:
            if not endpoint.address:
                continue
            at = json.loads(endpoint.address)
            said = {"key": update.key, "off": num_receivers}
            with suppress(OSError):
                greet(at["host"], at["port"], at["token"], said, GREETING_S).close()


def send(to: socket.socket, header: dict[str, Any], data: Any = b"") -> None:
    text = json.dumps(header).encode()
    to.sendall(LENGTH.pack(len(text)) + text)
    to.sendall(data)


def header(sender: socket.socket, limit: int = MAX_HEADER) -> dict[str, Any]:
    (length,) = LENGTH.unpack(read(sender, LENGTH.size).tobytes())
    if length > limit:
        raise ValueError(f"a header of {length} bytes")
    return json.loads(read(sender, length).tobytes())


def read(sender: socket.socket, count: int) -> np.ndarray:
    """Read so many bytes, [count] uint8."""
    data = np.empty(count, np.uint8)
    rest = memoryview(data.data)
    while rest:
        got = sender.recv_into(rest)
        if not got:
            raise ConnectionError("it closed the connection")
        rest = rest[got:]
    return data


def headers(peers: Sequence[socket.socket], seconds: float) -> list[dict[str, Any]]:
    """Read one message of every peer, as they come.

    One that went away shows while another is slow.

    Raises:
        TimeoutError: one said nothing for so long.
        ConnectionError: one closed the connection.
    """
    end, said = time.monotonic() + seconds, dict[socket.socket, dict[str, Any]]()
    while waiting := [peer for peer in peers if peer not in said]:
        ready = _readable(waiting, max(end - time.monotonic(), 0))
        if not ready:
            raise TimeoutError
        said |= {peer: header(peer) for peer in ready}
    return [said[peer] for peer in peers]


def _readable(peers: Sequence[socket.socket], seconds: float) -> list[socket.socket]:
    """Wait for a message or the end of any peer.

    ``select.select`` takes no descriptor above 1023, of which a flood makes many.
    """
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            selector.register(peer, selectors.EVENT_READ, peer)
        return [key.data for key, _ in selector.select(seconds)]
