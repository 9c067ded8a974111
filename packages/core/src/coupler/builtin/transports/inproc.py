"""Weights between a sender and a receiver of one process."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from coupler.builtin.transports.shape_check import check_fits
from coupler.builtin.transports.waiting import num_bytes, wait_until
from coupler.interfaces import Endpoint, Named, Rank, SendReceipt, Shapes, Transport, WeightUpdate

POLL_S = 0.0002


class InprocTransport(Transport):
    """Keeps a copy of every tensor until all receivers have read them."""

    def __init__(self) -> None:
        self.mailbox: dict[tuple[int, int, bool, bool], list[Named]] = {}
        # receivers that have not read the last update
        self.unread = 0

    def bind(self, rank: Rank) -> Endpoint:
        return Endpoint("inproc" if rank.index == 0 else "")

    def send(self, weights: Iterable[Named], update: WeightUpdate, rank: Rank) -> SendReceipt:
        start = time.perf_counter()
        self.mailbox.clear()
        # copies, since a tensor is valid only until the next one is asked for
        named = [(name, _copy(tensor)) for name, tensor in weights]
        self.unread = update.num_receivers
        self.mailbox[update.key] = named
        size = sum(num_bytes(tensor) for _, tensor in named)
        return SendReceipt(update.version, len(named), size, time.perf_counter() - start)

    def receive(self, update: WeightUpdate, worker: Rank, shapes: Shapes) -> Iterator[Named]:
        key = update.key
        what = f"weights of version {update.version}"
        wait_until(lambda: key in self.mailbox, what, update.deadline_s, every=POLL_S)
        for name, tensor in self.mailbox[key]:
            check_fits(name, tensor.shape, shapes)
            yield name, tensor
        self.unread -= 1
        if self.unread == 0:
            del self.mailbox[key]


def _copy(tensor: Any) -> Any:
    return tensor.copy() if isinstance(tensor, np.ndarray) else tensor.detach().clone()
