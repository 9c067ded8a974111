"""Let the processes of an engine start early, and take a device late."""

from __future__ import annotations

import os
from contextlib import suppress
from tempfile import mkstemp
from weakref import finalize

OPEN = b"open"


class Gate:
    """A file that the process of a rollout holds locked.

    Whoever waits for it goes on when that process opens it, closes it or ends.

    Attributes:
        path: what the processes that wait have to know.
    """

    def __init__(self, folder: str | None = None) -> None:
        """Make one in ``folder``, or where the temporary files of this machine are."""
        self._file, self.path = mkstemp(
            prefix="coupler-gate-",
            dir=folder,
        )
        self._end = finalize(
            self,
            _remove,
            self._file,
            self.path,
        )
        _lock(self._file, "LOCK_EX")

    def open(self) -> None:
        """Let all go on who wait, or will before :meth:`close`."""
        os.write(self._file, OPEN)
        _lock(self._file, "LOCK_UN")

    def close(self) -> None:
        """Remove the file. Whoever still waits learns that the gate stays shut."""
        self._end()


def opens(path: str) -> bool:
    """Wait at the gate of this path. Return whether it opened.

    The file of one that stays shut is removed, since a process that was killed has left
    it.
    """
    with suppress(FileNotFoundError):
        with open(path, "rb") as file:
            _lock(file.fileno(), "LOCK_SH")
            if file.read() == OPEN:
                return True
        os.unlink(path)
    return False


def _remove(file: int, path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
    os.close(file)


def _lock(file: int, how: str) -> None:
    import fcntl  # Windows has none

    fcntl.flock(file, getattr(fcntl, how))
