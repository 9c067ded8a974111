"""Strangers at the ports of a run.

Each case lets a crowd of them in on a real transfer of weights over TCP, or, one time
of eight, on ranks that meet in a store. The weights must arrive whole and the ranks
must meet, at most ``LATE_S`` later than without a crowd:

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
from dataclasses import dataclass

import numpy as np
from tests.faults import run

from coupler.builtin.transports.torch.tcp import TcpTransport
from coupler.engine_kit.rendezvous import keep_port, store_of
from coupler.interfaces import Rank, WeightUpdate
from coupler.system.gate import PROOF_BYTES, proof_of

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
    "TLS": tls,
    "pours": pouring,
    "noise": noise,
    "echo": echo,
}


# whole bytes of what clients of other protocols open with
PROTOCOLS = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "HTTP with a body": b"POST / HTTP/1.0\r\nContent-Length: 9\r\n\r\n{}",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    "WebSocket": b"GET / HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    "SSH": b"SSH-2.0-probe\r\n",
    "Redis": b"*1\r\n$4\r\nPING\r\n",
    "SMTP": b"EHLO a\r\n",
    "FTP": b"USER anonymous\r\n",
    "memcached": b"stats\r\n",
    "Postgres": b"\0\0\0\x08\x04\xd2\x16\x2f",
    "SMB": b"\0\0\0\x45\xffSMBr" + b"\0" * 60,
    "RDP": b"\3\0\0\x13\x0e\xe0\0\0\0\0\0\1\0\x08\0\3\0\0\0",
    "MQTT": b"\x10\x0c\0\4MQTT\4\2\0\x3c\0\0",
    "SOCKS": b"\5\1\0",
    "PROXY": b"PROXY TCP4 1.2.3.4 1.2.3.4 1 2\r\n",
    "DNS": b"\0\x1d\xaa\xaa\1\0\0\1\0\0\0\0\0\0\1a\0\0\x10\0\1",
    "ZMTP": b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + b"\0" * 48,
    "a store": b"\0\x85\x2c\x1c\x3c",
    "a pickle": b"\x80\4\x8c\5posix\x94\x8c\6system\x94\x93.",
    "TLS hello": b"\x16\3\1\2\0\1\0\1\xfc\3\3" + b"\7" * 300,
    "line ends": b"\r\n" * 500,
}
WHOLE = framed(b"\7" * PROOF_BYTES + OBJECT, len(OBJECT))
LENGTHS = (0, 1, 31, 4095, 4096, 4097, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 63, (1 << 63) - 1,
           (1 << 64) - 1, (1 << 64) - 4096)  # fmt: skip
ENCODINGS = ("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7")
# who knows the token and the key of an update that is under way is one of its receivers
OLD = b'{"key": [0, 0, false, false]}'
GREETINGS: dict[str, bytes] = {
    "an old key": OLD,
    "no key": b"{}",
    "a key of null": b'{"key": null}',
    "a key that is a text": b'{"key": "[1, 0, false, false]"}',
    "a key of floats": b'{"key": [9.5, 0.5, 0, 0]}',
    "a key of NaN": b'{"key": [NaN, Infinity, 0, 0]}',
    "a key with more": b'{"key": [1, 0, false, false, 0]}',
    "a deep key": b'{"key": ' + b"[" * 900 + b"]" * 900 + b"}",
    "a deep nest": b"[" * 4000,
    "a list": b"[]",
    "a number": b"1",
    "a huge number": b"1" * 4090,
    "nothing": b"",
    "no JSON": b"{]",
    "noise": bytes(range(256)),
    "called off for an old key": b'{"key": [0, 0, false, false], "off": 9}',
    **{f"{name}": OLD.decode().encode(name) for name in ENCODINGS},
}
POURED = b"7" * 90000
# the token by port, for those that know it
TOKENS: dict[int, str] = {}


def knowing(greeting: bytes, after: bytes, stay: bool) -> Stranger:
    """Greet with the right token, as a receiver of another update might."""

    def act(to: socket.socket, chance: random.Random, over: threading.Event) -> None:
        token = TOKENS.get(to.getpeername()[1], "")
        nonce = to.recv(PROOF_BYTES)
        to.sendall(framed(proof_of(token, nonce, greeting) + greeting, len(greeting)) + after)
        if stay:
            over.wait(STAY_S)

    return act


def replayed(change: str) -> Stranger:
    """Say what a peer said on another connection, or what the listener itself said."""

    def act(to: socket.socket, chance: random.Random, over: threading.Event) -> None:
        token, nonce = TOKENS.get(to.getpeername()[1], ""), to.recv(PROOF_BYTES)
        greeting = b'{"key": [1, 0, false, false]}'
        proof = {
            "another nonce": proof_of(token, bytes(PROOF_BYTES), greeting),
            "the nonce itself": nonce,
            "another greeting": proof_of(token, nonce, greeting + b" "),
            "a welcome": proof_of(token, nonce, b"welcome"),
            "half of a proof": proof_of(token, nonce, greeting)[:16] + bytes(16),
            "a proof of the token's start": proof_of(token[:-1], nonce, greeting),
            "an empty token": proof_of("", nonce, greeting),
        }[change]
        to.sendall(framed(proof + greeting, len(greeting)))
        over.wait(STAY_S)

    return act


def scanning(to: socket.socket, chance: random.Random, over: threading.Event) -> None:
    """Connect and leave, many times and from many ports."""
    for _ in range(200):
        with socket.socket() as knocking:
            knocking.setblocking(False)
            knocking.connect_ex(to.getpeername())
        if over.wait(0.001):
            return


def urgent(to: socket.socket, chance: random.Random, over: threading.Event) -> None:
    to.send(b"!", socket.MSG_OOB)
    to.sendall(WHOLE[:20])
    over.wait(STAY_S)


def tight(to: socket.socket, chance: random.Random, over: threading.Event) -> None:
    """Read nothing, with the smallest buffer."""
    to.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    to.sendall(WHOLE[:40])
    over.wait(STAY_S)


REPLAYS = ("another nonce", "the nonce itself", "another greeting", "a welcome", "half of a proof",
           "a proof of the token's start", "an empty token")  # fmt: skip
# each place of a greeting, up to a few bytes after its proof
PLACES = range(len(framed(b"")) + PROOF_BYTES + 8)
STRANGERS |= {
    **{name: said(data, stay=True) for name, data in PROTOCOLS.items()},
    **{f"{name}, in a frame": said(framed(data)) for name, data in PROTOCOLS.items()},
    **{f"{name}, slowly": dripping(data, 0.3) for name, data in PROTOCOLS.items()},
    **{f"stops after {i}": said(WHOLE[:i], stay=True) for i in PLACES},
    **{f"half closed after {i}": half_closed(WHOLE[:i]) for i in PLACES},
    **{f"reset after {i}": reset(WHOLE[:i]) for i in PLACES},
    **{f"a length of {n}": said(struct.pack(">Q", n), stay=True) for n in LENGTHS},
    **{f"a length of {n} and more": said(struct.pack(">Q", n) + b"7" * 9000) for n in LENGTHS},
    **{f"a little-endian length of {n}": said(struct.pack("<Q", n) + WHOLE) for n in LENGTHS},
    **{f"knows the token, {name}": knowing(said_, b"", False) for name, said_ in GREETINGS.items()},
    **{f"knows it and stays, {name}": knowing(g, b"", True) for name, g in GREETINGS.items()},
    **{
        f"knows it and pours, {name}": knowing(g, b"7" * 90000, True)
        for name, g in GREETINGS.items()
    },
    **{f"replays {change}": replayed(change) for change in REPLAYS},
    "scans": scanning,
    "urgent": urgent,
    "reads nothing": tight,
}


class Crowd:
    """Strangers at one port, each again and again until they are told to go."""

    def __init__(self, port: int, kinds: list[str], flood: int, seed: int) -> None:
        self.port, self.over = port, threading.Event()
        self.kinds, self.seed = kinds, seed
        self.flood = [self._knock() for _ in range(flood)]
        self.threads: list[threading.Thread] = []
        self.visits: list[socket.socket] = []

    def come(self) -> None:
        """Let all of them visit."""
        self.threads = [
            threading.Thread(target=self._visit, args=(kind, self.seed + i), daemon=True)
            for i, kind in enumerate(self.kinds)
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
                self.visits.append(to)
                STRANGERS[kind](to, chance, self.over)
            self.over.wait(0.05)

    def leave(self) -> None:
        """End the flood and all visits."""
        self.over.set()
        for knocking in self.flood:
            knocking.close()
        for to in list(self.visits):
            with suppress(OSError):
                to.shutdown(socket.SHUT_RDWR)  # one that waits for an answer wakes
        for thread in self.threads:
            thread.join(5)


@dataclass(frozen=True)
class Visit:
    """Who comes in one case, and when: before, between or while weights travel."""

    kinds: list[str]
    flood: int
    moment: str
    seed: int
    num_receivers: int


def transfer(visit: Visit) -> str:
    """Send weights in a crowd; return what went wrong, if anything."""
    transport = TcpTransport()
    endpoint = transport.bind(Rank())
    weights = [(f"w{i}", np.random.default_rng(i).random((50, 40))) for i in range(6)]
    at = json.loads(endpoint.address)
    TOKENS[at["port"]] = at["token"]

    crowd = Crowd(at["port"], visit.kinds, visit.flood, visit.seed)
    try:
        if visit.moment == "before":
            crowd.come()
            time.sleep(0.2)
        for version in (1, 2):
            target = "coupler.builtin.transports.torch.tcp:TcpTransport"
            count = visit.num_receivers
            update = WeightUpdate(version, "full", target, (endpoint,), count, DEADLINE_S)
            with ThreadPoolExecutor(count + 1) as pool:
                sending = pool.submit(transport.send, iter(weights), update, Rank())
                if visit.moment == "while" and version == 1:
                    crowd.come()
                    time.sleep(0.2)
                coming = [
                    pool.submit(lambda u=update: list(TcpTransport().receive(u, Rank(), {})))
                    for _ in range(count)
                ]
                sending.result(DEADLINE_S * 2)
                for each in coming:
                    got = each.result(DEADLINE_S * 2)
                    if [name for name, _ in got] != [name for name, _ in weights]:
                        return f"{len(got)} of {len(weights)} tensors came"
                    if not all((a == b).all() for (_, a), (_, b) in zip(got, weights, strict=True)):
                        return "other numbers came"
            if visit.moment == "between" and version == 1:
                crowd.come()
                time.sleep(0.2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        crowd.leave()
        del TOKENS[at["port"]]

    return ""


def meeting(visit: Visit) -> str:
    """Let ranks meet in a store in a crowd; return what went wrong, if anything."""
    port, kept = keep_port("127.0.0.1")
    world = 1 + visit.num_receivers
    at = f"127.0.0.1:{port}"
    ranks = [Rank(index=i, world=world, rendezvous=at) for i in range(world)]
    crowd = Crowd(port, visit.kinds, 0, visit.seed)

    # the store of rank 0 serves the others, also after it has read
    stores = []

    def meet(rank: Rank) -> list[bytes]:
        store = store_of(rank)
        stores.append(store)
        store.set(f"rank{rank.index}", f"{rank.index}" * 1000)
        return [store.get(f"rank{i}") for i in range(world)]

    try:
        if visit.moment == "before":
            crowd.come()
        with ThreadPoolExecutor(world) as pool:
            first = pool.submit(meet, ranks[0])
            if visit.moment != "before":
                crowd.come()
                time.sleep(0.2)
            for each in (first, *(pool.submit(meet, rank) for rank in ranks[1:])):
                said = each.result(DEADLINE_S)
                if said != [f"{i}".encode() * 1000 for i in range(world)]:
                    return f"ranks met and read other words: {said}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        crowd.leave()
        kept.close()

    return ""


def check(seed: int, cases: int) -> Iterator[str]:
    """Try crowds of each kind in turn, and between them mixed ones in floods."""
    chance = random.Random(seed)
    start = time.perf_counter()
    assert not transfer(Visit([], 0, "before", seed, 2))
    honest = time.perf_counter() - start
    order = chance.sample(sorted(STRANGERS), len(STRANGERS))

    for case in range(cases):
        alone, stores = case % 2 == 0, case % 8 == 4
        kinds = [order[case // 2 % len(order)]] * 6 if alone else chance.choices(order, k=40)
        flood = 0 if alone else chance.choice((0, 50, 300, 300, 3000))
        moment = chance.choice(("before", "between", "while"))
        visit = Visit(kinds, flood, moment, chance.randrange(1 << 30), chance.choice((1, 2, 3)))

        start = time.perf_counter()
        wrong = meeting(visit) if stores else transfer(visit)
        seconds = time.perf_counter() - start
        name = f"6 x {kinds[0]}" if alone else f"40 of {len(set(kinds))} kinds, flood of {flood}"
        name = f"{'store' if stores else 'weights'}, {moment}: {name}"
        if wrong:
            yield f"case {case}: {name}: {wrong}"
        elif seconds > honest + LATE_S:
            yield f"case {case}: {name}: {seconds:.1f} s, without them {honest:.1f} s"


if __name__ == "__main__":
    run(check, 504)
