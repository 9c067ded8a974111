"""Sample held-out prompts and score them: ``coupler eval``."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from coupler.cli.composing import check, composed, config_of_run, quoted
from coupler.cli.exported import exported
from coupler.cli.parser import Parser
from coupler.config.compose import Composed
from coupler.config.schema import Job
from coupler.errors import CouplerError
from coupler.plugins.manager import Plugins
from coupler.run.checkpoint import folders


def add_arguments(parser: Parser) -> None:
    parser.usage = "coupler eval [-h] (--config FILE | RUN [--step N]) [key=value ...]"
    parser.add_config()
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="with RUN, the folder of a run: the checkpoint of this step; default: its export, "
        "or its newest checkpoint",
    )


def run(arguments: argparse.Namespace) -> None:
    # No key has a slash, and a folder may have a name like lr=1e-5.
    runs = [
        text
        for text in arguments.overrides
        if "/" in (key := text.partition("=")[0]) or key == text
    ]
    if arguments.step is not None and not runs:
        raise CouplerError("--step needs the folder of a run.\n  try:  coupler eval RUN --step N")
    found, plugins = (
        _composed_of_model(arguments, runs[0]) if runs else composed(arguments, Job.EVAL)
    )
    check(found, plugins, Job.EVAL)
    from coupler.jobs import evaluate

    evaluate(found, plugins)


def _composed_of_model(arguments: argparse.Namespace, typed: str) -> tuple[Composed, Plugins]:
    """Compose the configuration that evaluates a model of a run, in a new folder inside
    the run's.
    """
    run = Path(typed)
    if arguments.config:
        raise CouplerError(
            f"coupler eval {run} has the run's configuration, and --config names another.\n"
            "  try:  coupler eval RUN key=value"
        )
    path, model = config_of_run(run), exported(run, arguments.step)

    steps = [folder.name.removeprefix("step_") for folder in folders(run / "checkpoints")]
    of_model = model.name.removeprefix("export_step_")
    label = of_model if of_model != model.name else steps[0] if steps else "export"
    given = [text for text in arguments.overrides if text != typed]
    arguments.config = str(path)
    new = (f"model.path={quoted(model)}", f"run_dir={quoted(run / f'eval_{label}')}")
    arguments.overrides = [*new, *given]
    found, plugins = composed(arguments, Job.EVAL)

    # The options of the run's file were set for its training, not for this evaluation.
    origin = {key: origin for key, origin in found.origin.items() if origin != arguments.config}
    return replace(found, origin=origin), plugins
