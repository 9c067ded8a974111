"""transport=nccl, over gloo on the CPU: its group outlives an update and follows its
members; its waits end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from coupler.builtin.transports.connection import connected, header, send
from coupler.builtin.transports.torch import nccl
from coupler.builtin.transports.torch.nccl import NcclTransport
from coupler.errors import PeerLost, WaitTimeout, WeightSyncError
from coupler.interfaces import Endpoint, Named, Rank, WeightUpdate

TARGET = "coupler.builtin.transports.torch.nccl:NcclTransport"


def weights() -> list[Named]:
    return [(f"w{i}", torch.randn(11, 1 + 7 * i)) for i in range(6)]


def update_of(
    endpoint: Endpoint, version: int, count: int, deadline_s: float = 20.0
) -> WeightUpdate:
    return WeightUpdate(version, "full", TARGET, (endpoint,), count, deadline_s)


def carry(
    sender: NcclTransport,
    receivers: dict[int, NcclTransport],
    update: WeightUpdate,
    delay_s: float = 0,
) -> None:
    """Send to all of them; the later one waits before it comes."""
    sent = weights()

    def receive(index: int, transport: NcclTransport) -> list[Named]:
        time.sleep(delay_s * index)
        return [
            (name, tensor.clone())
            for name, tensor in transport.receive(update, Rank(index=index), {})
        ]

    with ThreadPoolExecutor(1 + len(receivers)) as pool:
        sending = pool.submit(sender.send, iter(sent), update, Rank())
        for received in [pool.submit(receive, i, transport) for i, transport in receivers.items()]:
            for (name, want), (got_name, got) in zip(sent, received.result(20), strict=True):
                assert name == got_name and torch.equal(want, got)
        assert sending.result(20).num_tensors == len(sent)


def test_a_group_meets_on_loopback_alone() -> None:
    sender = NcclTransport()
    carry(sender, {0: NcclTransport()}, update_of(sender.bind(Rank()), 0, 1))
    (group,) = sender.groups.values()
    lines = [
        line
        for kind in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()
    ]
    found = [line.split()[1:4:2] for line in lines]
    assert [
        local
        for local, state in found
        if state == "0A" and local.endswith(f":{group.store.port:04X}")
    ] == [f"0100007F:{group.store.port:04X}"]


def test_the_group_stays_while_its_members_do(monkeypatch: pytest.MonkeyPatch) -> None:
    # several buckets, and tensors larger than one
    monkeypatch.setattr(nccl, "BUFFER_BYTES", 1000)
    sender = NcclTransport()
    endpoint = sender.bind(Rank())
    receivers = {i: NcclTransport() for i in range(2)}
    carry(sender, receivers, update_of(endpoint, 0, 2), delay_s=0.1)
    (first,) = sender.groups.values()
    carry(sender, receivers, update_of(endpoint, 1, 2))
    carry(sender, dict(reversed(receivers.items())), update_of(endpoint, 2, 2), delay_s=0.1)
    assert list(sender.groups.values()) == [first]


def test_a_member_that_was_started_again_makes_a_new_group() -> None:
    sender = NcclTransport()
    endpoint = sender.bind(Rank())
    receivers = {i: NcclTransport() for i in range(2)}
    carry(sender, receivers, update_of(endpoint, 0, 2))
    (first,) = sender.groups.values()
    carry(sender, {**receivers, 1: NcclTransport()}, update_of(endpoint, 1, 2))
    (second,) = sender.groups.values()
    assert second is not first
    carry(sender, {0: receivers[0]}, update_of(endpoint, 2, 1))


@pytest.mark.parametrize("joins", [False, True])
def test_a_collective_that_a_worker_never_joins_ends_at_the_deadline(joins: bool) -> None:
    sender = NcclTransport()
    update = update_of(sender.bind(Rank()), 0, 1, deadline_s=1.5)

    def absent() -> None:
        """Understand everything, and take part in nothing."""
        with connected(
            update.endpoints[0].address, replace(update, deadline_s=20.0), group=""
        ) as connection:
            said = header(connection)
            group = None
            if joins:
                store = torch.distributed.TCPStore(said["host"], said["port"], is_master=False)
                group = nccl.Group(
                    store, said["rank"], said["world"], nccl.Watch(update, [connection])
                )
                said = header(connection)
                send(connection, {"digest": nccl._digest(said["entries"], said["nbytes"])})
            with suppress(ConnectionError):
                while True:
                    header(connection)
            del group

    start = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(absent)
        with pytest.raises(
            WaitTimeout,
            match="a receiver took no weights" if joins else "the group that carries weights",
        ):
            sender.send(iter([("w", torch.zeros(64 << 20, dtype=torch.uint8))]), update, Rank())
        assert time.monotonic() - start < 4


VICTIM = """
import json, os, signal, sys, time
import torch
from coupler.interfaces import Endpoint, WeightUpdate
from coupler.builtin.transports.torch import nccl
from coupler.builtin.transports.connection import connected, header, send

said, moment = json.loads(sys.argv[1]), sys.argv[2]
endpoints = tuple(Endpoint(**each) for each in said["endpoints"])
update = WeightUpdate(**{**said, "endpoints": endpoints})

def reached(name):
    if name == moment:
        os.kill(os.getpid(), signal.SIGKILL)

with connected(update.endpoints[0].address, update, group="") as sender:
    said = header(sender)
    reached("before the group")
    store = torch.distributed.TCPStore(said["host"], said["port"], is_master=False)
    group = nccl.Group(store, said["rank"], said["world"], nccl.Watch(update, [sender]))
    said = header(sender)
    send(sender, {"digest": nccl._digest(said["entries"], said["nbytes"])})
    reached("in the collective")
    header(sender)
    reached("after the last header")
    sender.close()
    time.sleep(60)
"""


@pytest.mark.parametrize(
    "moment",
    ["before the group", "in the collective", "after the last header", "never: it hangs up"],
)
@pytest.mark.parametrize(
    "num_bytes", [1 << 10, 64 << 20]
)  # what a socket holds, and what waits for its reader
def test_a_receiver_that_goes_away_ends_the_wait(moment: str, num_bytes: int) -> None:
    """Long before the deadline, and with the name that lets a sync try again once that
    replica is back.
    """
    sender = NcclTransport()
    update = update_of(sender.bind(Rank()), 0, 1, deadline_s=60.0)
    victim = subprocess.Popen([sys.executable, "-c", VICTIM, json.dumps(asdict(update)), moment])
    start = time.monotonic()
    try:
        with pytest.raises(PeerLost, match="a receiver of weights version 0 went away"):
            sender.send(iter([("w", torch.zeros(num_bytes, dtype=torch.uint8))]), update, Rank())
    finally:
        victim.kill()
        victim.wait()
    assert time.monotonic() - start < 30


def test_a_sender_that_goes_away_ends_the_wait() -> None:
    """Its own failure is raised there; a receiver says only that it went."""
    sender, receiver = NcclTransport(), NcclTransport()
    update = update_of(sender.bind(Rank()), 0, 1, deadline_s=60.0)

    def broken() -> Iterator[Named]:
        yield "w", torch.zeros(nccl.BUFFER_BYTES + 1, dtype=torch.uint8)
        raise ZeroDivisionError

    start = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, broken(), update, Rank())
        with pytest.raises(PeerLost, match="the sender of weights version 0 went away"):
            list(receiver.receive(update, Rank(), {}))
        with pytest.raises(ZeroDivisionError):
            sending.result(20)
    assert time.monotonic() - start < 30


def test_other_names_are_refused_before_the_collective() -> None:
    sender = NcclTransport()
    update = update_of(sender.bind(Rank()), 0, 1, deadline_s=3.0)

    def confused() -> Iterator[None]:
        with connected(update.endpoints[0].address, update, group="") as connection:
            said = header(connection)
            store = torch.distributed.TCPStore(said["host"], said["port"], is_master=False)
            group = nccl.Group(store, said["rank"], said["world"], nccl.Watch(update, [connection]))
            said = header(connection)
            said["entries"][0]["shape"] = [1]
            send(connection, {"digest": nccl._digest(said["entries"], said["nbytes"])})
            time.sleep(0.5)
            del group

    with ThreadPoolExecutor(1) as pool:
        pool.submit(confused)
        with pytest.raises(WeightSyncError, match="expects other tensors than w0"):
            sender.send(iter(weights()), update, Rank())
