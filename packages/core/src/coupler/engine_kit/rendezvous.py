"""Let processes of ``torch.distributed`` meet on one address, not on all interfaces."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from coupler.interfaces import Rank

if TYPE_CHECKING:
    from torch.distributed import TCPStore

# Torch's own limit for ranks to find each other. A slow disk may keep one from it.
MEET = timedelta(minutes=30)


def keep_port(host: str) -> tuple[int, socket.socket]:
    """Return a free port of ``host``, and the socket that keeps it from everyone but a
    server which listens there.

    That socket is bound and never listens; Linux lets one server listen beside it.
    Elsewhere it is closed already, and another process may be faster than the server.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind((host, 0))
    port = kept.getsockname()[1]
    if sys.platform != "linux":
        kept.close()
    return port, kept


def keep_gloo_local(host: str) -> None:
    """Let gloo listen on loopback alone where everybody meets on this machine.

    Otherwise it listens on the address of the machine's name. A choice that the
    environment holds already is kept.

    Args:
        host: where they meet. Empty for a process that meets nobody.
    """
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in names), None)

    is_local = host in ("", "localhost")
    with suppress(ValueError):
        is_local = is_local or ipaddress.ip_address(host).is_loopback
    if is_local and loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def store_of(rank: Rank) -> TCPStore:
    """Open the store in which an engine's ranks meet. The first rank serves it."""
    from torch.distributed import TCPStore

    host, _, port = rank.rendezvous.rpartition(":")
    if rank.index:
        return TCPStore(host, int(port), rank.world, timeout=MEET)
    return serve_store(host, int(port), MEET, rank.world)


def serve_store(host: str, port: int, timeout: timedelta, world: int | None = None) -> TCPStore:
    """Serve a store on ``host`` alone. A store that torch opens listens on every
    interface.

    Args:
        port: 0 for any that is free, which the store's ``port`` then is.
        world: wait for so many processes; None: for none.
    """
    from torch.distributed import TCPStore

    listener = socket.create_server((host, port), backlog=world)
    return TCPStore(
        host,
        listener.getsockname()[1],
        world,
        is_master=True,
        wait_for_workers=world is not None,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )
