"""Strangers at the port of a weight transfer.

Each case lets a crowd of them in on a real transfer over TCP. The weights must arrive
whole, and at most ``LATE_S`` later than without a crowd:

    python -m tests.faults.strangers SEED CASES
"""

from __future__ import annotations

import json
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
from tests.faults import run

from coupler.builtin.transports.gate import PROOF_BYTES, proof_of
from coupler.builtin.transports.torch.tcp import TcpTransport
from coupler.interfaces import Rank, WeightUpdate

# a gate that is flooded may drop a peer, which comes again after a moment
LATE_S = 20.0
DEADLINE_S = 120.0
# a stranger that stays, stays so long
STAY_S = 60.0
Stranger = Callable[[socket.socket, random.Random, threading.Event], None]


def framed(text: bytes, length: int | None = None) -> bytes:
    """Return a message as transfers know it, or one whose length is not true."""
    return struct.pack(">Q", len(text) if length is None else length) + text


def said(data: bytes, stay: bool = False) -> Stranger:
    """Say something, and hang up or stay."""

    def act(to: socket.socket, chance: random.Random, over: threading.Event) -> None:
        to.sendall(data)
        if stay:
            over.wait(STAY_S)

    return act


def silent(to: socket.socket, chance: random.Random, over: threading.Event) -> None:
    over.wait(STAY_S)


def dripping(data: bytes, every: float) -> Stranger:
    """Say one byte after another."""

    def act(to: socket.socket, chance: random.Random, over: threading.Event) -> None:
        for i in range(len(data)):
            to.sendall(data[i : i + 1])
            if over.wait(every):
                return

    return act


def reset(data: bytes) -> Stranger:
    """Say something, and leave with a reset."""

    def act(to: socket.socket, chance: random.Random, over: threading.Event) -> None:
        to.sendall(data)
        to.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    return act


def half_closed(data: bytes) -> Stranger:
    """Say something, end the own direction, and stay."""

    def act(to: socket.socket, chance: random.Random, over: threading.Event) -> None:
        to.sendall(data)
        to.shutdown(socket.SHUT_WR)
        over.wait(STAY_S)

    return act


def deaf(to: socket.socket, chance: random.Random, over: threading.Event) -> None:
    """End the direction of the listener at once."""
    to.shutdown(socket.SHUT_RD)
    over.wait(STAY_S)


def pouring(to: socket.socket, chance: random.Random, over: threading.Event) -> None:
    """Say as much as is taken."""
    while not over.is_set():
        to.sendall(chance.randbytes(1 << 16))


def tls(to: socket.socket, chance: random.Random, over: threading.Event) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    to.settimeout(STAY_S)
    context.wrap_socket(to).close()


def noise(to: socket.socket, chance: random.Random, over: threading.Event) -> None:
    to.sendall(chance.randbytes(chance.randrange(1, 5000)))
    over.wait(chance.random())


def answering(token: bytes, greeting: bytes) -> Stranger:
    """Follow the protocol up to the proof, which is of a guessed token."""

    def act(to: socket.socket, chance: random.Random, over: threading.Event) -> None:
        nonce = to.recv(PROOF_BYTES)
        to.sendall(framed(proof_of(token.decode(), nonce, greeting) + greeting, len(greeting)))
        over.wait(STAY_S)

    return act


def echo(to: socket.socket, chance: random.Random, over: threading.Event) -> None:
    """Say what the listener says."""
    while data := to.recv(4096):
        to.sendall(data)


OBJECT = json.dumps({"token": "0" * 64, "key": [1, 0, False, False]}).encode()
STRANGERS: dict[str, Stranger] = {
    "leaves at once": said(b""),
    "silent": silent,
    "deaf": deaf,
    "one byte": said(b"\0", stay=True),
    "a length only": said(framed(b"", 64), stay=True),
    "half a length": said(b"\0\0\0\0", stay=True),
    "a length of zero": said(framed(b"") + b"\0" * 64, stay=True),
    "the greatest length": said(b"\xff" * 8, stay=True),
    "a terabyte": said(framed(b"", 1 << 40), stay=True),
    "a number": said(framed(b"7")),
    "a text": said(framed(b'"token"')),
    "a list": said(framed(b"[1, 2]")),
    "null": said(framed(b"null")),
    "a deep nest": said(framed(b"[" * 4000)),
    "a deep nest of objects": said(framed(b'{"a":' * 800)),
    "not JSON": said(framed(b"{]")),
    "not UTF-8": said(framed(b"\xff\xfe{}")),
    "no token": said(framed(b"{}")),
    "a token of another type": said(framed(b'{"token": {"a": 1}, "key": 3}')),
    "a token that is a list": said(framed(b'{"token": [1], "key": null}')),
    "a token that is a guess": said(framed(OBJECT), stay=True),
    "a huge number": said(framed(b'{"token": ' + b"9" * 4000 + b"}")),
    "a proof of nothing": answering(b"", b"{}"),
    "a proof of a guess": answering(b"0" * 64, OBJECT),
    "a proof and a list": answering(b"1", b"[]"),
    "a slow length": dripping(framed(b"", 64), 0.5),
    "a slow greeting": dripping(framed(OBJECT), 0.2),
    "a slow drip of noise": dripping(b"\0" * 40, 2.0),
    "half closed": half_closed(b""),
    "half closed in a length": half_closed(b"\0\0\0"),
    "half closed in a greeting": half_closed(framed(b"{", 40)),
    "reset at once": reset(b""),
    "reset in a greeting": reset(framed(b"{", 40)),
    "reset after a greeting": reset(framed(OBJECT)),
    "HTTP": said(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", stay=True),
    "HTTP with a body": said(b"POST / HTTP/1.0\r\nContent-Length: 9\r\n\r\n{}", stay=True),
    "TLS": tls,
    "SSH": said(b"SSH-2.0-probe\r\n", stay=True),
    "Redis": said(b"*1\r\n$4\r\nPING\r\n", stay=True),
    "pours": pouring,
    "noise": noise,
    "echo": echo,
}


class Crowd:
    """Strangers at one port, each again and again until they are told to go."""

    def __init__(self, port: int, kinds: list[str], flood: int, seed: int) -> None:
        self.port, self.over = port, threading.Event()
        self.flood = [self._knock() for _ in range(flood)]
        self.threads = [
            threading.Thread(target=self._visit, args=(kind, seed + i), daemon=True)
            for i, kind in enumerate(kinds)
        ]
        for thread in self.threads:
            thread.start()

    def _knock(self) -> socket.socket:
        knocking = socket.socket()
        knocking.setblocking(False)
        knocking.connect_ex(("127.0.0.1", self.port))
        return knocking

    def _visit(self, kind: str, seed: int) -> None:
        chance = random.Random(seed)
        while not self.over.is_set():
            with (
                suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), timeout=STAY_S) as to,
            ):
                STRANGERS[kind](to, chance, self.over)
            self.over.wait(0.05)

    def leave(self) -> None:
        """End the flood and all visits."""
        self.over.set()
        for knocking in self.flood:
            knocking.close()
        for thread in self.threads:
            thread.join(5)


def transfer(kinds: list[str], flood: int, seed: int, num_receivers: int) -> tuple[str, float]:
    """Send weights in a crowd; return what went wrong, if anything, and seconds."""
    transport = TcpTransport()
    endpoint = transport.bind(Rank())
    weights = [(f"w{i}", np.random.default_rng(i).random((50, 40))) for i in range(6)]

    crowd = Crowd(json.loads(endpoint.address)["port"], kinds, flood, seed)
    start = time.perf_counter()
    try:
        # they are there before the transfer begins
        time.sleep(0.2)
        for version in (1, 2):
            target = "coupler.builtin.transports.torch.tcp:TcpTransport"
            update = WeightUpdate(version, "full", target, (endpoint,), num_receivers, DEADLINE_S)
            with ThreadPoolExecutor(num_receivers + 1) as pool:
                sending = pool.submit(transport.send, iter(weights), update, Rank())
                coming = [
                    pool.submit(lambda u=update: list(TcpTransport().receive(u, Rank(), {})))
                    for _ in range(num_receivers)
                ]
                sending.result(DEADLINE_S * 2)
                for each in coming:
                    got = each.result(DEADLINE_S * 2)
                    if [name for name, _ in got] != [name for name, _ in weights]:
                        return f"{len(got)} of {len(weights)} tensors came", 0.0
                    if not all((a == b).all() for (_, a), (_, b) in zip(got, weights, strict=True)):
                        return "other numbers came", 0.0
    except Exception as error:
        return f"{type(error).__name__}: {error}", 0.0
    finally:
        seconds = time.perf_counter() - start
        crowd.leave()

    return "", seconds


def check(seed: int, cases: int) -> Iterator[str]:
    """Try crowds of each kind in turn, and between them mixed ones in floods."""
    chance = random.Random(seed)
    _, honest = transfer([], 0, seed, 2)
    order = chance.sample(sorted(STRANGERS), len(STRANGERS))

    for case in range(cases):
        alone = case % 2 == 0
        kinds = [order[case // 2 % len(order)]] * 6 if alone else chance.choices(order, k=40)
        flood = 0 if alone else chance.choice((0, 50, 300))
        name = f"6 x {kinds[0]}" if alone else f"40 of {len(set(kinds))} kinds, flood of {flood}"

        wrong, seconds = transfer(kinds, flood, chance.randrange(1 << 30), chance.choice((1, 2, 3)))
        if wrong:
            yield f"case {case}: {name}: {wrong}"
        elif seconds > honest + LATE_S:
            yield f"case {case}: {name}: {seconds:.1f} s, without them {honest:.1f} s"


if __name__ == "__main__":
    run(check, 84)
