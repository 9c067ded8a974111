"""Check a sweep, run it, and tell what came of it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from coupler.cli.composing import check
from coupler.cli.sweep.one_run import OneRun, Record, name_of, read_records, run_options
from coupler.cli.sweep.search import search
from coupler.cli.sweep.space import Space, read_space
from coupler.cli.sweep.summary import summarise
from coupler.config.compose import Composed, compose
from coupler.config.schema import Job
from coupler.errors import CouplerError
from coupler.executors.torchrun.launch import launch_of
from coupler.plugins.manager import Plugins
from coupler.system.log import get_logger
from coupler.system.words import count

log = get_logger(__name__)

FAILED = 1


def sweep(arguments: argparse.Namespace, job: Job) -> int:
    """Run the job for each combination, and return the exit code.

    It is 1 where a run failed.

    Raises:
        CouplerError: a combination is refused. Then no run has started.
        KeyboardInterrupt: of Ctrl-C, after the table of the runs that were started.
    """
    if launch_of(os.environ):
        raise CouplerError(
            "--multirun starts processes of its own, and torchrun has started these.\n"
            "  try:  the same command without torchrun, and engine.ranks=2 for two GPUs"
        )

    space = read_space(arguments.overrides)
    folder, names = _check(space, arguments.config, job)
    run = OneRun(
        job=job,
        fixed=tuple(space.fixed),
        config=arguments.config,
        folder=folder,
        level=arguments.level,
    )
    try:
        search(space, run)
    except KeyboardInterrupt:
        with suppress(CouplerError):
            _tell(space, job, folder, names)
        raise
    records = _tell(space, job, folder, names)
    return FAILED if any(record.code for record in records) else 0


def _tell(space: Space, job: Job, folder: Path, names: Sequence[str]) -> list[Record]:
    """Print what came of the runs that were started, and return how they ended."""
    ended = read_records(folder)
    wanted = ended if space.searched else names
    records = [ended[name] for name in wanted if name in ended]
    summarise(records, job, folder)
    return records


def _check(space: Space, file: str | None, job: Job) -> tuple[Path, list[str]]:
    """Compose and check every combination.

    Returns:
        The folder of the sweep, and the names of its runs.

    Raises:
        CouplerError: a combination is refused, or two are the same run.
    """
    plugins, combinations = Plugins.load(), space.combinations()
    first = _composed(plugins, [*space.fixed, *combinations[0]], file, job, combinations[0])
    folder = Path(first.config.run_dir)

    names = [name_of(each) for each in combinations]
    for name in names:
        if names.count(name) > 1:
            raise CouplerError(f"two runs of the sweep are {name}.\n  try:  each value once")

    for swept in combinations:
        options = run_options(space.fixed, swept, folder)
        found = _composed(plugins, options, file, job, swept)
        with _named(swept):
            check(found, plugins, job)
    log.info(f"{count(len(names), 'combination')} checked; the runs are in {folder}")
    return folder, names


def _composed(
    plugins: Plugins, options: list[str], file: str | None, job: Job, swept: list[str]
) -> Composed:
    with _named(swept):
        return compose(plugins, options, file, job)


@contextmanager
def _named(swept: Sequence[str]) -> Iterator[None]:
    """Name the combination that is refused."""
    try:
        yield
    except CouplerError as error:
        values = " ".join(swept)
        raise CouplerError(f"{error}\n  in the run of:  {values}") from None
