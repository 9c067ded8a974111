"""Compose the configuration that a command names, or that a run folder holds."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from coupler.config.compose import Composed, compose
from coupler.config.options import SECTIONS, section
from coupler.config.overrides import read_file
from coupler.config.schema import Job
from coupler.errors import CouplerError
from coupler.plugins.manager import Plugins
from coupler.run.inputs import check_inputs
from coupler.run.plan import make_plan
from coupler.run.resume import restore_config
from coupler.run.row_form import sections
from coupler.run.run_folder import read_starts
from coupler.system.files import reading
from coupler.system.log import get_logger

log = get_logger(__name__)


def composed(
    arguments: argparse.Namespace, job: Job, *, complete: bool = True
) -> tuple[Composed, Plugins]:
    """Compose ``--config`` and the overrides, and warn of what is wrong with plugins.

    Args:
        complete: False for a configuration that cannot run yet.
    """
    plugins = Plugins.load()
    found = compose(plugins, arguments.overrides, arguments.config, job, complete=complete)
    chosen = [(kind, section(found.config, path)) for path, kind in SECTIONS.items()]
    used = [(kind, inner.name) for kind, inner in chosen if inner is not None]

    for text in (*plugins.warnings(), *plugins.unknown(used), *found.notes):
        log.warning(text)
    return found, plugins


def checked(arguments: argparse.Namespace, job: Job) -> tuple[Composed, Plugins]:
    """Compose a job, and check what it reads before anything heavy is loaded."""
    found, plugins = composed(arguments, job)
    check(found, plugins, job)
    return found, plugins


def check(found: Composed, plugins: Plugins, job: Job) -> None:
    """Check what a job reads.

    Raises:
        CouplerError: a file of it is missing, or the plan is impossible.
    """
    if job != Job.EVAL:
        make_plan(found.config, None, plugins, job=job)
    check_inputs(found.config, job, sections(found.config, plugins, job))


def config_of_run(run: Path) -> Path:
    """Return ``config.yaml`` of a run folder, put back from a checkpoint if it is lost.

    Raises:
        CouplerError: it is no run folder, or is of a format that is not known.
    """
    if os.path.isfile(run):
        raise CouplerError(f"{run} is a file, and no run folder.\n  try:  one of:  coupler runs")
    restore_config(run)
    path = run / "config.yaml"
    with reading(path):
        there = path.is_file()
    if not there:
        raise CouplerError(f"{run} is no run folder: it has no config.yaml.")
    read_starts(run)  # refuses a format that is not known
    return path


def composed_of_run(arguments: argparse.Namespace) -> tuple[Composed, Plugins]:
    """Compose the configuration that a run folder holds, to look into it with one
    process.
    """
    path = config_of_run(arguments.run)
    arguments.config = str(path)
    plugins, written = Plugins.load(), read_file(str(path))
    engines = {
        "engine": written.get("engine"),
        "critic.engine": written.get("critic", {}).get("engine"),
        "teacher.engine": written.get("teacher", {}).get("engine"),
        "reward_model.engine": written.get("reward_model", {}).get("engine"),
    }
    one_rank = [
        f"{section}.{key}={value}"
        for section, engine in engines.items()
        if engine
        for key, value in plugins.get("engine", engine["name"]).config.one_rank.items()
    ]

    arguments.overrides = ["executor=local", *one_rank, *arguments.overrides]
    return composed(arguments, Job.TRAIN, complete=False)


def quoted(path: Path | str) -> str:
    """Return a path as the value of an override, whatever is in it."""
    return "'" + str(path).replace("'", "\\'") + "'"
