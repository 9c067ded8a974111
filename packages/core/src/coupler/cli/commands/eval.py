"""Sample held-out prompts and score them: ``coupler eval``."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from coupler.cli.composing import check, composed
from coupler.cli.parser import Parser
from coupler.config.compose import Composed
from coupler.config.schema import Job
from coupler.errors import CouplerError
from coupler.plugins.manager import Plugins
from coupler.run.checkpoint import folders
from coupler.run.resume import restore_config
from coupler.run.run_folder import read_starts
from coupler.run.saving import export_problem


def add_arguments(parser: Parser) -> None:
    parser.add_config()


def run(arguments: argparse.Namespace) -> None:
    runs = [text for text in arguments.overrides if "=" not in text]
    found, plugins = (
        _composed_of_export(arguments, Path(runs[0])) if runs else composed(arguments, Job.EVAL)
    )
    check(found, plugins, Job.EVAL)
    from coupler.jobs import evaluate

    evaluate(found, plugins)


def _composed_of_export(arguments: argparse.Namespace, run: Path) -> tuple[Composed, Plugins]:
    """Compose the configuration that evaluates the export of a run, in a new folder
    inside the run's.
    """
    restore_config(run)
    path, export = run / "config.yaml", run / "export"

    if arguments.config or not path.is_file():
        why = (
            "--config names another configuration" if arguments.config else "it has no config.yaml"
        )
        raise CouplerError(
            f"coupler eval {run} needs the folder of a run: {why}.\n  try:  coupler eval RUN "
            "key=value"
        )
    read_starts(run)  # refuses a format that is not known
    if export.is_dir() and (problem := export_problem(export)):
        raise CouplerError(
            f"the export of {run} is damaged: {problem}.\n"
            f"  try:  the command that trained it, which writes {export} again"
        )
    if not export.is_dir():
        raise CouplerError(
            f"{run} has no export to evaluate.\n  try:  coupler export {run} --out {export}"
        )

    steps = [folder.name.removeprefix("step_") for folder in folders(run / "checkpoints")]
    folder = run / f"eval_{steps[0] if steps else 'export'}"
    given = [
        text for text in arguments.overrides if text != str(run) and text.rstrip("/") != str(run)
    ]
    arguments.config = str(path)
    arguments.overrides = [f"model.path={_quoted(export)}", f"run_dir={_quoted(folder)}", *given]
    found, plugins = composed(arguments, Job.EVAL)

    # The options of the run's file were set for its training, not for this evaluation.
    origin = {key: origin for key, origin in found.origin.items() if origin != arguments.config}
    return replace(found, origin=origin), plugins


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "\\'") + "'"
