"""Connections of receivers to a sender: who does not know the sender's random token is hung up on.

On the wire, each way: messages of a length (8 bytes, big endian), a JSON header, and as many bytes as it announces.
"""

from __future__ import annotations

import hmac
import json
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from coupler.errors import PeerLost, WaitTimeout
from coupler.interfaces import Endpoint, Rank, Transport, WeightUpdate

LENGTH = struct.Struct(">Q")
MAX_HEADER = 1 << 24
GREETING_S = 10.0
MAX_GREETING = 1 << 16


class Listener:
    """Listens on a rank's node, or on loopback where it has none."""

    def __init__(self, rank: Rank, **facts: Any) -> None:
        self.socket = socket.create_server((rank.node or "127.0.0.1", 0))
        host, port = self.socket.getsockname()
        self.host, self.token = host, secrets.token_hex(32)
        self.address = json.dumps({"host": host, "port": port, "token": self.token, **facts})

    @contextmanager
    def accepted(self, update: WeightUpdate) -> Iterator[list[tuple[socket.socket, dict[str, Any]]]]:
        """Wait for every receiver of this update; each comes with what it said of itself.

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
                f"a receiver took no weights of version {update.version} for {update.deadline_s:.0f} s.\n"
                "  look at:  the rollout's log, sync.deadline_s"
            ) from None
        except OSError as error:
            raise PeerLost(f"a receiver of weights version {update.version} went away: {error}.") from None
        finally:
            for receiver, _ in receivers:
                receiver.close()

    def _accept(self, update: WeightUpdate, receivers: list[tuple[socket.socket, dict[str, Any]]]) -> None:
        end, lost = time.monotonic() + update.deadline_s, 0
        while len(receivers) + lost < update.num_receivers:  # after a loss too: who came late would wait for nothing
            self.socket.settimeout(max(end - time.monotonic(), 0.001))
            try:
                receiver, _ = self.socket.accept()
            except TimeoutError:
                raise WaitTimeout(
                    f"waited {update.deadline_s:.0f} s for {update.num_receivers} receivers of weights version "
                    f"{update.version}; {len(receivers)} came.\n  look at:  the rollout's log, sync.deadline_s"
                ) from None
            receiver.settimeout(GREETING_S)
            said = _greeting(receiver)
            if hmac.compare_digest(str(said.get("token")), self.token) and said.get("key") == list(update.key):
                if said.get("off"):
                    receiver.close()
                    lost += int(said["off"])
                    receivers[:] = [each for each in receivers if is_open(each[0])]  # the dead one's may be there
                    continue
                receiver.settimeout(update.deadline_s)
                receiver.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                receivers.append((receiver, said))
            else:
                receiver.close()
        if lost:
            raise ConnectionError("it died before all had come")


def is_open(receiver: socket.socket) -> bool:
    """Whether the other side still holds this connection; a closed one is closed here too."""
    said_more, _, _ = select.select([receiver], [], [], 0)
    with suppress(OSError):
        if not said_more or receiver.recv(1, socket.MSG_PEEK):
            return True
    receiver.close()
    return False


@contextmanager
def connected(address: str, update: WeightUpdate, **facts: Any) -> Iterator[socket.socket]:
    """Connect to the :class:`Listener` at ``address`` and say who we are.

    Raises:
        WaitTimeout: nothing came from it within the update's deadline.
        PeerLost: it went away.
    """
    at = json.loads(address)
    try:
        with socket.create_connection((at["host"], at["port"]), timeout=update.deadline_s) as sender:
            sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            send(sender, {"token": at["token"], "key": update.key, **facts})
            yield sender
    except TimeoutError:
        raise WaitTimeout(
            f"waited {update.deadline_s:.0f} s for weights of version {update.version} from "
            f"{at['host']}:{at['port']}.\n  look at:  the sender's log, sync.deadline_s"
        ) from None
    except OSError as error:
        raise PeerLost(f"the sender of weights version {update.version} went away: {error}.") from None


class ConnectedTransport(Transport):
    """A transport whose sender waits for connections at a :class:`Listener`."""

    def __init__(self) -> None:
        self.listeners: dict[str, Listener] = {}  # by address, one per engine in this process

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
            with suppress(OSError), socket.create_connection((at["host"], at["port"]), timeout=GREETING_S) as sender:
                send(sender, {"token": at["token"], "key": update.key, "off": num_receivers})


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
    """[count] uint8."""
    data = np.empty(count, np.uint8)
    rest = memoryview(data.data)
    while rest:
        got = sender.recv_into(rest)
        if not got:
            raise ConnectionError("it closed the connection")
        rest = rest[got:]
    return data


def headers(peers: Sequence[socket.socket], seconds: float) -> list[dict[str, Any]]:
    """One message of every peer, taken as they come: one that went away shows while another is slow.

    Raises:
        TimeoutError: one said nothing for so long.
        ConnectionError: one closed the connection.
    """
    end, said = time.monotonic() + seconds, dict[socket.socket, dict[str, Any]]()
    while waiting := [peer for peer in peers if peer not in said]:
        ready, _, _ = select.select(waiting, [], [], max(end - time.monotonic(), 0))
        if not ready:
            raise TimeoutError
        said |= {peer: header(peer) for peer in ready}
    return [said[peer] for peer in peers]


def _greeting(receiver: socket.socket) -> dict[str, Any]:
    try:
        return header(receiver, MAX_GREETING)
    except (OSError, ValueError):
        return {}
