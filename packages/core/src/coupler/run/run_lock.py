"""Lock a run folder so that two processes never write to it.

``filelock`` holds a lock of the operating system, which ends with its process. Forked
children let go of it. Three things are added here. The lock file names its holder. The
file is removed in the end, and the folder too if it stayed empty. A disk without locks
costs a warning instead of the run.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path

from filelock import FileLock, Timeout

from coupler.errors import ConfigError
from coupler.system.files import disk_errors_named, set_aside
from coupler.system.log import get_logger, log_file

NAME, LOG = ".lock", "coupler.log"
RETRY_S = 0.2  # A holder may delete the file between our opening and our locking it.

log = get_logger(__name__)


class Held(Enum):
    """The state of a run folder's lock."""

    FREE = "free"
    BY_A_PROCESS = "by a process"
    # A process that was killed does not remove its file.
    LEFT_BEHIND = "left behind"


def held(run_dir: Path) -> Held:
    """Tell whether a process holds ``run_dir``. Nothing in it changes.

    Raises:
        OSError: the file of the lock cannot be opened, or the disk has no locks.
    """
    path = run_dir / NAME
    if not path.is_file():
        return Held.FREE

    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return Held.BY_A_PROCESS
    lock.release()
    return Held.LEFT_BEHIND


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Hold ``run_dir`` while the block lasts, and write messages to its
    ``coupler.log``.

    The folder is made if there is none. It is removed again if nothing but messages was
    written to it. A warning says so where there are no locks, as on some network disks.

    Raises:
        ConfigError: another process holds it, or it cannot be written.
    """
    path = run_dir / NAME
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    with _writing(run_dir):
        made = not run_dir.exists()
        run_dir.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
            log.warning(f"{path} is no file; it is kept as {set_aside(path)}")
        path.touch()

    _take(lock, run_dir)
    try:
        # On Windows nobody writes to a locked file.
        with _writing(run_dir), suppress(PermissionError):
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        with log_file(run_dir / LOG), disk_errors_named(run_dir):
            yield
    finally:
        with suppress(OSError):  # The file says nothing without its lock.
            path.unlink()
        with suppress(OSError):
            if made and {file.name for file in run_dir.iterdir()} <= {LOG}:
                (run_dir / LOG).unlink(missing_ok=True)
                run_dir.rmdir()
        lock.release()


def _take(lock: FileLock, run_dir: Path) -> None:
    path = run_dir / NAME
    try:
        lock.acquire(timeout=RETRY_S, poll_interval=RETRY_S / 4)
    except Timeout:
        raise ConfigError(
            f"run_dir={run_dir} is in use by {_holder(path)}; nothing in it was touched.\n"
            "  try:  another run_dir, or the same command once that run has ended"
        ) from None
    except OSError as error:
        why = error.strerror or error
        log.warning(f"no lock keeps a second process out of run_dir={run_dir}: {why}")


@contextmanager
def _writing(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"run_dir={run_dir} cannot be written: {error.strerror or error}.\n"
            "  try:  another run_dir"
        ) from None


def _holder(path: Path) -> str:
    with suppress(OSError):  # It is gone by now, or locked against readers, too.
        return path.read_text(encoding="utf-8") or "another process"
    return "another process"
