"""Sender and receiver share a process: tensors travel as references."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from coupler.interfaces import Endpoint, Named, Rank, SendReceipt, Transport, WeightUpdate
from coupler.transports.waiting import num_bytes, wait_until


class InprocTransport(Transport):
    """Keeps the tensors of the last update until the next one. Receivers copy what they load."""

    def __init__(self) -> None:
        self.mailbox: dict[tuple[int, bool], list[Named]] = {}

    def bind(self, rank: Rank) -> Endpoint:
        return Endpoint("inproc" if rank.index == 0 else "")

    def send(self, weights: Iterable[Named], update: WeightUpdate, rank: Rank) -> SendReceipt:
        start = time.perf_counter()
        self.mailbox.clear()
        named = list(weights)
        self.mailbox[update.version, update.permuted] = named
        size = sum(num_bytes(tensor) for _, tensor in named)
        return SendReceipt(update.version, len(named), size, time.perf_counter() - start)

    def receive(self, update: WeightUpdate, worker: Rank) -> Iterator[Named]:
        key = update.version, update.permuted
        wait_until(lambda: key in self.mailbox, f"weights of version {update.version}", update.deadline_s)
        yield from self.mailbox[key]
