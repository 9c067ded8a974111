"""Weights over a TCP connection from engine rank 0 to every receiver.

They travel in host memory, one tensor at a time. A header is ``{name, dtype, shape,
framework, nbytes}``. A header without a name ends the stream.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from coupler.builtin.transports.connection import ConnectedTransport, connected, header, read, send
from coupler.builtin.transports.shape_check import check_fits
from coupler.builtin.transports.waiting import num_bytes
from coupler.interfaces import Named, Rank, SendReceipt, Shapes, WeightUpdate


class TcpTransport(ConnectedTransport):
    """Sends from rank 0 to every receiver."""

    def send(self, weights: Iterable[Named], update: WeightUpdate, rank: Rank) -> SendReceipt:
        start = time.perf_counter()

        if rank.index:
            sizes = [num_bytes(tensor) for _, tensor in weights]
        else:
            with self.listeners[update.endpoints[0].address].accepted(update) as receivers:
                sizes = []
                for name, tensor in weights:
                    described, data = _packed(name, tensor)
                    for receiver, _ in receivers:
                        send(receiver, described, data)
                    sizes.append(num_bytes(tensor))
                for receiver, _ in receivers:
                    send(receiver, {})

        return SendReceipt(update.version, len(sizes), sum(sizes), time.perf_counter() - start)

    def receive(self, update: WeightUpdate, worker: Rank, shapes: Shapes) -> Iterator[Named]:
        with connected(update.endpoints[0].address, update) as sender:
            while "name" in (described := header(sender)):
                check_fits(described["name"], described["shape"], shapes)
                yield described["name"], _unpacked(described, read(sender, described["nbytes"]))


def _packed(name: str, tensor: Any) -> tuple[dict[str, Any], np.ndarray]:
    described = {"name": name, "shape": list(tensor.shape), "nbytes": num_bytes(tensor)}
    if isinstance(tensor, np.ndarray):
        flat = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
        return {**described, "framework": "np", "dtype": tensor.dtype.str}, flat
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return {**described, "framework": "pt", "dtype": str(tensor.dtype).removeprefix("torch.")}, flat


def _unpacked(described: dict[str, Any], data: np.ndarray) -> Any:
    if described["framework"] == "np":
        return data.view(np.dtype(described["dtype"])).reshape(described["shape"])
    import torch

    dtype = getattr(torch, described["dtype"])
    # torch views no empty tensor as a wider type
    if not len(data):
        return torch.empty(described["shape"], dtype=dtype)
    return torch.from_numpy(data).view(dtype).reshape(described["shape"])
