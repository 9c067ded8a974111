"""Tell what came of a sweep: a table, ``sweep.json`` and ``sweep.html``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coupler.cli.sweep.one_run import Record
from coupler.cli.sweep.space import label
from coupler.cli.table import table
from coupler.config.schema import Job
from coupler.errors import CouplerError
from coupler.system.files import write_whole, writing
from coupler.system.log import get_logger
from coupler.system.terminal import harmless

log = get_logger(__name__)

METRICS = {Job.TRAIN: "reward/mean", Job.SFT: "loss"}
"""Metric of a job that tells how good a run is."""
MAX_REASON = 80
NAMES = {Job.TRAIN: "reward", Job.SFT: "loss"}


def summarise(records: Sequence[Record], job: Job, folder: Path) -> None:
    """Print the runs as a table, and write them to the folder of the sweep."""
    keys = list(dict.fromkeys(key for record in records for key in record.values))
    rows = [_row(record, job, folder) for record in records]
    with writing(f"the results in {folder}"):
        write_whole(folder / "sweep.json", json.dumps(rows, indent=2))

    name = NAMES[job]
    head = [*map(label, keys), f"first {name}", f"last {name}", "ended", "folder"]
    cells = [
        [
            *(_shown(row["values"].get(key)) for key in keys),
            _shown(row["first"]),
            _shown(row["last"]),
            _cut(_shown(row["ended"])),
            row["folder"],
        ]
        for row in rows
    ]
    print(table([head, *cells]))
    _report([folder / record.name for record in records], folder / "sweep.html")


def last_value(run: Path, metric: str) -> float | None:
    """Return the last value of a metric in a run folder, or None where it has none."""
    return _ends(run, metric)[1]


def _row(record: Record, job: Job, folder: Path) -> dict[str, Any]:
    first, last = _ends(folder / record.name, METRICS[job])
    return {
        "values": record.values,
        "metric": METRICS[job],
        "first": first,
        "last": last,
        "ended": record.ended,
        "folder": str(folder / record.name),
    }


def _ends(run: Path, metric: str) -> tuple[float | None, float | None]:
    """Return the first and the last value of a metric."""
    from coupler.jobs.report.reading import read_run

    try:
        values = [value for _, value in read_run(run, run.name).column(metric)]
    except CouplerError:
        return None, None
    finite = [value for value in values if value is not None]
    return (finite[0], finite[-1]) if finite else (None, None)


def _report(runs: Sequence[Path], page: Path) -> None:
    """Write the page that compares the runs, as far as one has numbers."""
    from coupler.jobs.report import report

    try:
        report([run for run in runs if run.is_dir()] or runs, page)
    except CouplerError as error:
        log.warning(f"there is no {page}: {str(error).splitlines()[0]}")
        return
    print(page)


def _cut(text: str) -> str:
    """Return a reason that leaves the table readable. ``sweep.json`` has it whole."""
    return text if len(text) <= MAX_REASON else f"{text[: MAX_REASON - 1]}…"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else harmless(str(value))
