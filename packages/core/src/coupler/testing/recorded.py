"""Find numbers in what a tracker wrote, without knowing its format."""

from __future__ import annotations

import sqlite3
import struct
from contextlib import closing
from pathlib import Path

# SQLite's files begin with it. Deleted rows stay in them as free space.
SQLITE = b"SQLite format 3\0"
# TensorBoard's files have it in their name. Rewound numbers stay, behind a mark.
EVENTS = "events.out.tfevents"


def holds(folder: Path, number: float) -> bool:
    """Tell if a reader of the files in ``folder`` finds ``number``, as text or as
    binary floating point.

    The number has few digits, and float32 holds it.
    """
    return any(_holds(path, number) for path in sorted(folder.rglob("*")) if path.is_file())


def _holds(path: Path, number: float) -> bool:
    if path.name.startswith(EVENTS):
        return number in _scalars(path.parent)
    content = path.read_bytes()

    if content.startswith(SQLITE):
        with closing(sqlite3.connect(path)) as database:
            content = "\n".join(database.iterdump()).encode()
    forms = [
        repr(number).encode(),
        *(struct.pack(code, number) for code in ("<f", ">f", "<d", ">d")),
    ]
    return any(form in content for form in forms)


def _scalars(folder: Path) -> set[float]:
    """Read the scalars that TensorBoard shows of a folder of event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {scalar.value for tag in events.Tags()["scalars"] for scalar in events.Scalars(tag)}
