"""List the runs in a folder, and how they stand: ``coupler runs``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from coupler.cli.parser import Parser
from coupler.cli.table import table
from coupler.errors import CouplerError
from coupler.run.overview import Overview, find_runs, look_at

HEAD = ("run", "algorithm", "model", "step", "reward", "age", "state")
UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def add_arguments(parser: Parser) -> None:
    parser.description = (
        "List the runs in a folder. A state is running, done, interrupted (by Ctrl-C), failed "
        "with the reason, killed (it had no time to say why) or damaged."
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), metavar="DIR")


def run(arguments: argparse.Namespace) -> None:
    folder: Path = arguments.folder
    if not os.path.isdir(folder):
        raise CouplerError(f"there is no folder {folder}.\n  try:  coupler runs DIR")
    rows = [_row(look_at(found), folder) for found in find_runs(folder)]
    print(table([HEAD, *rows]) if rows else f"{folder} holds no runs")


def _row(found: Overview, folder: Path) -> tuple[str, ...]:
    name = found.folder.relative_to(folder)
    step = "-" if found.step is None else f"{found.step}/{found.steps or '?'}"

    return (
        str(name if name.parts else found.folder.resolve().name),
        found.algorithm or "-",
        "/".join(Path(found.model).parts[-2:]) or "-",
        step,
        "-" if found.reward is None else f"{found.reward:.3g}",
        _age(found.age_s),
        f"{found.state}: {found.problem}" if found.problem else found.state,
    )


def _age(seconds: float) -> str:
    unit, size = next((each for each in UNITS if seconds >= each[1]), UNITS[-1])
    return f"{seconds // size:.0f} {unit}"
