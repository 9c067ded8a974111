"""Say what a program may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of each interpreter, and of a sandbox.

    Attributes:
        memory_gib: GiB of address space of a process on top of what it starts with, and
            of memory that all processes of an interpreter use.
        processes: processes and threads of an interpreter.
        files_mib: MiB of its files, in ``/tmp`` and again in ``/dev/shm``.
        interpreters: interpreters that live at once.
        imports: modules that are imported once, before any program starts.
        output_bytes: bytes of output and of errors that are kept of each call.
    """

    memory_gib: float = 1.0
    processes: int = 16
    files_mib: int = 64
    interpreters: int = 256
    imports: tuple[str, ...] = ()
    output_bytes: int = 1 << 20
