"""Serve the calls of rank 0 in another process that ``torchrun`` started."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from coupler.errors import WorkerDied
from coupler.executors.host import Failure
from coupler.executors.torchrun.launch import Launch, join
from coupler.executors.torchrun.wire import receive, send
from coupler.interfaces import open_transport
from coupler.system.imports import resolve
from coupler.system.plain import RECEIVED


def serve(launch: Launch, run_dir: Path, seconds: float) -> None:
    """Hold the workers of this rank, and answer until rank 0 closes them.

    Calls run on this thread, one after the other.

    Args:
        seconds: limit for rank 0 to appear.

    Raises:
        WorkerDied: rank 0 ended without a word. Only rank 1 says so.
    """
    connection = join(launch, run_dir, seconds)
    connection.settimeout(None)  # it ends with the process of rank 0
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    workers: dict[str, Any] = {}
    with suppress(ValueError):  # of a thread beside the main one
        signal.signal(signal.SIGTERM, _told_to_end)

    try:
        while _answer(connection, workers):
            pass
    except (OSError, ValueError):
        if launch.rank > 1 or not _is_gone(connection):
            _leave()
        raise WorkerDied("rank 0, which controls the run, ended.") from None


def _answer(connection: socket.socket, workers: dict[str, Any]) -> bool:
    """Answer one call. Tell whether more may come."""
    role, method, args = receive(connection)

    if method == "start":
        build, spec = args
        send(connection, _tried(lambda: workers.update({role: resolve(build)(spec)})))
    elif method == "reads":
        send(connection, sorted(RECEIVED.keys))
    elif method == "close":
        send(connection, _tried(lambda: _close(workers)))
        return False
    else:
        send(connection, _tried(lambda: getattr(workers[role], method)(*args)))
    return True


def _tried(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or the :class:`Failure` that it was."""
    try:
        return call()
    # third-party code, whose exceptions the controller raises
    except (Exception, SystemExit) as error:
        return Failure.of(error)


def _close(workers: dict[str, Any]) -> None:
    for worker in workers.values():
        if hasattr(worker, "close"):
            worker.close()
    open_transport.cache_clear()


def _told_to_end(*_: Any) -> None:
    """Torchrun ends all processes where one has ended."""
    raise ConnectionError("torchrun ends this process")


def _is_gone(connection: socket.socket) -> bool:
    """Tell whether the other side has closed the connection, or died."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _leave() -> None:
    """End this process without a word, since another one says it."""
    sys.stdout.flush()
    os._exit(1)
