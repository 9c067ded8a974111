"""Hold the limits of one interpreter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of one interpreter.

    Attributes:
        memory: bytes of its processes.
        processes: processes and threads.
        tmp: bytes of its files.
    """

    memory: int
    processes: int
    tmp: int
