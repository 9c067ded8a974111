"""Version and read the format of run folders, checkpoints and records."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from coupler.batch import Batch
from coupler.conversation.packing import with_origins
from coupler.errors import CouplerError
from coupler.plugins.manager import CORE
from coupler.system.archives import check_archive
from coupler.system.files import DamagedFile, reading

# The format that this release writes, and the newest that it reads. Absent means 1.
FORMAT = 1
KEY = "format"


def check_format(facts: Mapping[str, Any], path: Path) -> None:
    """Refuse a file that a newer release wrote in a format of its own.

    Args:
        facts: what the file ``path`` says of itself.

    Raises:
        DamagedFile: the format is no number.
        CouplerError: the format is newer than this release reads.
    """
    found = facts.get(KEY, 1)
    if type(found) is not int:
        raise DamagedFile(f"{path} is damaged: its format is no number.")
    if found > FORMAT:
        raise CouplerError(
            f"{path} has format {found}, and coupler-core {version(CORE)} reads formats up to "
            f"{FORMAT}.\n"
            "  try:  pip install --upgrade coupler-core"
        )


def load_batch(path: Path) -> Batch:
    """Read a batch that Coupler wrote.

    Raises:
        DamagedFile: ``path`` is no such file.
    """
    check_archive(path)
    with reading(path):
        batch = Batch.load(path)
        lengths = batch.lengths
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths < 0).any():
            raise ValueError("its lengths are no list of token counts")
    return with_origins(batch)


def number_of(path: Path) -> int | None:
    """Return the number of a folder ``step_12``, or None where its name is another."""
    text = path.name.removeprefix("step_")
    if text == path.name or not text.isascii() or not text.isdecimal() or len(text) > 18:
        return None
    return int(text) if str(int(text)) == text else None
