"""transport=tcp: who does not know the token gets nothing, and who goes away is
named.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from coupler.builtin.transports.torch.tcp import TcpTransport
from coupler.errors import WaitTimeout, WeightSyncError
from coupler.interfaces import Endpoint, Named, Rank, WeightUpdate
from coupler.system.gate import LENGTH


def update_of(transport: TcpTransport, deadline_s: float = 5.0) -> WeightUpdate:
    endpoints = (transport.bind(Rank()),)
    return WeightUpdate(
        1, "full", "coupler.builtin.transports.torch.tcp:TcpTransport", endpoints, 1, deadline_s
    )


def with_token(update: WeightUpdate, token: str) -> WeightUpdate:
    address = {**json.loads(update.endpoints[0].address), "token": token}
    return replace(update, endpoints=(Endpoint(json.dumps(address)),))


def test_it_listens_on_loopback_for_who_knows_the_token() -> None:
    transport = TcpTransport()
    update = update_of(transport)
    address = json.loads(update.endpoints[0].address)
    assert address["host"] == "127.0.0.1"
    weights = [("w", np.arange(6.0).reshape(2, 3))]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(transport.send, iter(weights), update, Rank())
        with socket.create_connection((address["host"], address["port"])) as rude:
            rude.sendall(LENGTH.pack(1 << 40))  # neither a header nor short
            with pytest.raises(WeightSyncError, match="went away"):
                list(TcpTransport().receive(with_token(update, "guessed"), Rank(), {}))
        ((name, tensor),) = TcpTransport().receive(update, Rank(), {})
        assert name == "w" and (tensor == weights[0][1]).all()
        assert sending.result(5).num_tensors == 1


def test_a_sender_without_receivers_ends() -> None:
    transport = TcpTransport()
    with pytest.raises(WaitTimeout, match="1 receivers of weights version 1; 0 came"):
        transport.send(iter(()), update_of(transport, 0.2), Rank())


def test_a_sender_that_fails_is_noticed() -> None:
    transport = TcpTransport()
    update = update_of(transport)

    def stream() -> Iterator[Named]:
        yield "w", np.ones(3)
        raise ValueError("engine")

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(transport.send, stream(), update, Rank())
        with pytest.raises(WeightSyncError, match="the sender of weights version 1 went away"):
            list(TcpTransport().receive(update, Rank(), {}))
        with pytest.raises(ValueError, match="engine"):
            sending.result(5)
