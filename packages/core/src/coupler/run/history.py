"""Read the numbers of a run from its ``metrics.jsonl``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coupler.builtin.trackers.jsonl import MAX_BYTES
from coupler.system.files import DamagedFile, json_line, read_bytes


def numbers_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return a mapping for each step, with its ``step``. None is what was not finite.

    Lines that are damaged are left out. Without the file there are none.
    """
    try:
        lines = read_bytes(run_dir / "metrics.jsonl", MAX_BYTES).splitlines()
    except DamagedFile:
        return []
    found = map(json_line, lines)
    return [row for row in found if row and type(row.get("step")) is int]
