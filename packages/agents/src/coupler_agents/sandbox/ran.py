"""Hold how a program ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from coupler import CouplerError


class SandboxFailed(CouplerError):
    """A sandbox failed for a reason that is not the program's."""


@dataclass(frozen=True, slots=True)
class Ran:
    """The end of a program, and what it wrote.

    Attributes:
        code: its exit code, or 128 and the number of the signal that killed it.
        files: those that were asked for and are there, by name.
        timed_out: whether it was ended because its time was over.
        ended: why the sandbox ended it for another reason, or nothing.
    """

    stdout: str
    stderr: str
    code: int
    files: dict[str, bytes] = field(default_factory=dict)
    timed_out: bool = False
    ended: str = ""


def clean(data: bytes | str) -> str:
    """Return a text of which every character has a code in UTF-8."""
    if isinstance(data, bytes):
        return data.decode("utf-8", "replace")
    return data.encode("utf-8", "backslashreplace").decode()


def check_files(files: object, where: str) -> dict[str, str]:
    """Return files by name, as a program gets them.

    Raises:
        SandboxFailed: a name leaves the folder of the program, or a content is no text.
    """
    if not isinstance(files, dict):
        raise SandboxFailed(f"{where} is no object of names and texts.")

    for name, text in files.items():
        parts = str(name).split("/")
        if not name or name.startswith("/") or ".." in parts or "\x00" in name:
            raise SandboxFailed(
                f"{where}: the name {name!r} leaves the folder of the program.\n"
                "  use:  a name like data.txt or folder/data.txt"
            )
        if not isinstance(text, str):
            raise SandboxFailed(f"{where}: the content of {name} is no text.")
    return files
