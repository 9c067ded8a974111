"""Let the processes of an engine start early, and take a device late."""

from __future__ import annotations

from tempfile import NamedTemporaryFile

OPEN = b"open"


class Gate:
    """A file that the process of a rollout holds locked.

    Whoever waits for it goes on when that process opens it, closes it or ends.

    Attributes:
        path: what the processes that wait have to know.
    """

    def __init__(self) -> None:
        self._file = NamedTemporaryFile(prefix="coupler-gate-", buffering=0)  # noqa: SIM115
        self.path = self._file.name
        _lock(self._file.fileno(), "LOCK_EX")

    def open(self) -> None:
        """Let all go on who wait, or will before :meth:`close`."""
        self._file.write(OPEN)
        _lock(self._file.fileno(), "LOCK_UN")

    def close(self) -> None:
        """Remove the file. Whoever still waits learns that the gate stays shut."""
        self._file.close()


def opens(path: str) -> bool:
    """Wait at the gate of this path. Return whether it opened."""
    try:
        with open(path, "rb") as file:
            _lock(file.fileno(), "LOCK_SH")
            return file.read() == OPEN
    except FileNotFoundError:
        return False


def _lock(file: int, how: str) -> None:
    import fcntl  # Windows has none

    fcntl.flock(file, getattr(fcntl, how))
