"""Files that are whole or as they were, and what to say where they cannot be written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coupler.errors import CouplerError


def write_whole(path: Path, text: str) -> None:
    """Write beside ``path`` and rename: who is killed amid it leaves what was there."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


@contextmanager
def writing(what: str, *also: type[Exception]) -> Iterator[None]:
    """Name ``what`` the block writes where the disk is full, or refuses for another reason.

    Args:
        also: exceptions of a library that mean the same as an ``OSError``.

    Raises:
        CouplerError: it cannot be written.
    """
    try:
        yield
    except (OSError, *also) as error:
        raise CouplerError(
            f"{what} cannot be written: {error}.\n"
            "  try:  room and permission to write there, then the same command: a run goes on from its last checkpoint"
        ) from error
