"""Format of what a run leaves behind: its folder, its checkpoints and its records."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from coupler.errors import CouplerError
from coupler.plugins.manager import CORE

FORMAT = 1  # what this release writes, and the newest that it reads; absent means 1
KEY = "format"


def check_format(facts: Mapping[str, Any], path: Path) -> None:
    """Refuse what a newer release wrote in a format of its own.

    Args:
        facts: what the file ``path`` says of itself.

    Raises:
        CouplerError: the format is newer than this release reads.
    """
    found = facts.get(KEY, 1)
    if found > FORMAT:
        raise CouplerError(
            f"{path} has format {found}, and coupler-core {version(CORE)} reads formats up to {FORMAT}.\n"
            "  try:  pip install --upgrade coupler-core"
        )
