"""A port that is promised to a rank stays free until that rank listens on it."""

from __future__ import annotations

import socket
import sys

import pytest

from coupler.engine_kit.rendezvous import keep_port

HOST = "127.0.0.1"


@pytest.mark.skipif(
    sys.platform != "linux", reason="other systems let no server listen beside the socket"
)
def test_a_kept_port_is_taken_by_its_server_alone() -> None:
    port, kept = keep_port(HOST)
    with kept:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((HOST, port))
        assert port not in {found for found, _ in _ports(200)}
        with socket.create_server((HOST, port)) as server:
            with (
                socket.create_connection((HOST, port), timeout=10),
                pytest.raises(OSError, match="in use"),
            ):
                socket.create_server((HOST, port))
            assert server.getsockname()[1] == port


def _ports(count: int) -> list[tuple[int, socket.socket]]:
    taken = [keep_port(HOST) for _ in range(count)]
    for _, kept in taken:
        kept.close()
    return taken
