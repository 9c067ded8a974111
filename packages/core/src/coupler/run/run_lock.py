"""One process at a time in a run folder: a lock of the operating system, which ends with its process in any case."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from coupler.errors import ConfigError

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

NAME = ".lock"
_held: set[IO[str]] = set()


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Hold ``run_dir``, which is made if it has to be, for as long as the block lasts; what it left empty goes again.

    Where there are no such locks, on Windows and on some network disks, a warning says so.

    Raises:
        ConfigError: another process holds it, or it cannot be written.
    """
    made = not run_dir.exists()
    try:
        file = _lock(run_dir)
    except OSError as error:
        raise ConfigError(f"run_dir={run_dir} cannot be written: {error.strerror}.\n  try:  another run_dir") from None
    _held.add(file)
    try:
        yield
    finally:
        _held.discard(file)
        with suppress(OSError):  # the file says nothing without its lock
            (run_dir / NAME).unlink()
            if made and not any(run_dir.iterdir()):
                run_dir.rmdir()
        file.close()


def _lock(run_dir: Path) -> IO[str]:
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / NAME
    while True:
        file = path.open("a", encoding="utf-8")
        try:
            _take(file, run_dir)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):  # else its last holder has deleted it since
                    file.truncate(0)
                    file.write(f"process {os.getpid()} on {socket.gethostname()}")
                    file.flush()
                    return file
        except BaseException:
            file.close()
            raise
        file.close()


def _take(file: IO[str], run_dir: Path) -> None:
    try:
        if fcntl is None:
            raise OSError("this system has none")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = Path(file.name).read_text(encoding="utf-8") or "another process"
        raise ConfigError(
            f"run_dir={run_dir} is in use by {holder}; nothing in it was touched.\n"
            "  try:  another run_dir, or the same command once that run has ended"
        ) from None
    except OSError as error:
        why = error.strerror or error
        print(f"coupler: warning: no lock keeps a second process out of run_dir={run_dir}: {why}", file=sys.stderr)


def _let_go() -> None:
    """In a process that a fork made: the lock would last as long as its copy of the file is open."""
    for file in _held:
        file.close()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
