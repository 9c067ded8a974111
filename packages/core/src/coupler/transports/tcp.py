"""Weights over a TCP connection from engine rank 0 to every receiver, one tensor at a time, in host memory.

On the wire, each way: the receiver says the token, then the sender sends messages of a length (8 bytes, big endian), a
JSON header ``{name, dtype, shape, framework, nbytes}`` and the tensor's bytes; a header without a name ends the stream.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from coupler.errors import WaitTimeout, WeightSyncError
from coupler.interfaces import Endpoint, Named, Rank, SendReceipt, Transport, WeightUpdate
from coupler.transports.waiting import num_bytes

LENGTH = struct.Struct(">Q")
MAX_HEADER = 1 << 16
GREETING_S = 10.0


class TcpTransport(Transport):
    """Rank 0 listens on its node's address, or on loopback where it has none, for whoever knows its random token."""

    def __init__(self) -> None:
        self.listeners: dict[str, socket.socket] = {}  # by address, one per engine in this process

    def bind(self, rank: Rank) -> Endpoint:
        if rank.index:
            return Endpoint()
        listener = socket.create_server((rank.node or "127.0.0.1", 0))
        host, port = listener.getsockname()
        address = json.dumps([host, port, secrets.token_hex(32)])
        self.listeners[address] = listener
        return Endpoint(address)

    def send(self, weights: Iterable[Named], update: WeightUpdate, rank: Rank) -> SendReceipt:
        start = time.perf_counter()
        receivers = self._accept(update) if rank.index == 0 else []
        number, size = 0, 0
        try:
            for name, tensor in weights:
                if receivers:
                    header, data = _packed(name, tensor)
                    for receiver in receivers:
                        _send(receiver, header, data)
                number += 1
                size += num_bytes(tensor)
            for receiver in receivers:
                _send(receiver, {"key": _key(update)}, b"")
        except TimeoutError:
            raise WaitTimeout(
                f"a receiver took no weights of version {update.version} for {update.deadline_s:.0f} s.\n"
                "  look at:  the rollout's log, sync.deadline_s"
            ) from None
        except OSError as error:
            raise WeightSyncError(f"a receiver of weights version {update.version} went away: {error}.") from None
        finally:
            for receiver in receivers:
                receiver.close()
        return SendReceipt(update.version, number, size, time.perf_counter() - start)

    def _accept(self, update: WeightUpdate) -> list[socket.socket]:
        """Wait for every receiver of this update; who does not know the token is hung up on."""
        address = update.endpoints[0].address
        listener, token = self.listeners[address], json.loads(address)[2]
        end = time.monotonic() + update.deadline_s
        receivers: list[socket.socket] = []
        while len(receivers) < update.num_receivers:
            listener.settimeout(max(end - time.monotonic(), 0.001))
            try:
                receiver, _ = listener.accept()
            except TimeoutError:
                for waiting in receivers:
                    waiting.close()
                raise WaitTimeout(
                    f"waited {update.deadline_s:.0f} s for {update.num_receivers} receivers of weights version "
                    f"{update.version}; {len(receivers)} came.\n  look at:  the rollout's log, sync.deadline_s"
                ) from None
            receiver.settimeout(GREETING_S)
            if _greets(receiver, token, _key(update)):
                receiver.settimeout(update.deadline_s)
                receivers.append(receiver)
            else:
                receiver.close()
        return receivers

    def receive(self, update: WeightUpdate, worker: Rank) -> Iterator[Named]:
        host, port, token = json.loads(update.endpoints[0].address)
        try:
            with socket.create_connection((host, port), timeout=update.deadline_s) as sender:
                _send(sender, {"token": token, "key": _key(update)}, b"")
                while "name" in (header := _header(sender)):
                    yield header["name"], _unpacked(header, _read(sender, header["nbytes"]))
        except TimeoutError:
            raise WaitTimeout(
                f"waited {update.deadline_s:.0f} s for weights of version {update.version} from {host}:{port}.\n"
                "  look at:  the sender's log, sync.deadline_s"
            ) from None
        except OSError as error:
            raise WeightSyncError(f"the sender of weights version {update.version} went away: {error}.") from None


def _key(update: WeightUpdate) -> list[Any]:
    return [update.version, update.permuted]


def _greets(receiver: socket.socket, token: str, key: list[Any]) -> bool:
    try:
        said = _header(receiver)
    except (OSError, ValueError):
        return False
    return hmac.compare_digest(str(said.get("token")), token) and said.get("key") == key


def _send(to: socket.socket, header: dict[str, Any], data: Any) -> None:
    text = json.dumps(header).encode()
    to.sendall(LENGTH.pack(len(text)) + text)
    to.sendall(data)


def _header(sender: socket.socket) -> dict[str, Any]:
    (length,) = LENGTH.unpack(_read(sender, LENGTH.size).tobytes())
    if length > MAX_HEADER:
        raise ValueError(f"a header of {length} bytes")
    return json.loads(_read(sender, length).tobytes())


def _read(sender: socket.socket, count: int) -> np.ndarray:
    """[count] uint8."""
    data = np.empty(count, np.uint8)
    rest = memoryview(data.data)
    while rest:
        got = sender.recv_into(rest)
        if not got:
            raise ConnectionError("it closed the connection")
        rest = rest[got:]
    return data


def _packed(name: str, tensor: Any) -> tuple[dict[str, Any], np.ndarray]:
    header = {"name": name, "shape": list(tensor.shape), "nbytes": num_bytes(tensor)}
    if isinstance(tensor, np.ndarray):
        flat = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
        return {**header, "framework": "np", "dtype": tensor.dtype.str}, flat
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return {**header, "framework": "pt", "dtype": str(tensor.dtype).removeprefix("torch.")}, flat


def _unpacked(header: dict[str, Any], data: np.ndarray) -> Any:
    if header["framework"] == "np":
        return data.view(np.dtype(header["dtype"])).reshape(header["shape"])
    import torch

    dtype = getattr(torch, header["dtype"])
    if not len(data):  # torch views no empty tensor as a wider type
        return torch.empty(header["shape"], dtype=dtype)
    return torch.from_numpy(data).view(dtype).reshape(header["shape"])
