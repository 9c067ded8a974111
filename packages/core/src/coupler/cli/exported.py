"""Find the exported model of a run, and write it where there is none."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from coupler.cli.composing import composed_of_run, config_of_run
from coupler.errors import CouplerError
from coupler.jobs import export_run, last_step
from coupler.run.saving import export_problem
from coupler.system.log import get_logger

log = get_logger(__name__)


def exported(run: Path, step: int | None) -> Path:
    """Return the folder of the model after ``step``: the export at the end of the run,
    or ``export_step_N``, which is written from the checkpoint if it is not there.

    Args:
        step: None is the end of the run, or its newest checkpoint.

    Raises:
        CouplerError: it is no run folder, has no such checkpoint, or the export is
            damaged.
    """
    config_of_run(run)
    folder = run / "export"
    if step is None and os.path.lexists(folder):
        if problem := export_problem(folder):
            raise CouplerError(
                f"the export of {run} is damaged: {problem}.\n"
                f"  try:  the command that trained it, which writes {folder} again"
            )
        return folder

    step = last_step(run) if step is None else step
    folder = run / f"export_step_{step}"
    if not os.path.lexists(folder):
        asked = argparse.Namespace(run=run, overrides=[])
        export_run(*composed_of_run(asked), run, step, folder)
        log.info(f"{folder}: the policy after step {step}")
    if problem := export_problem(folder):
        raise CouplerError(
            f"{folder} is damaged: {problem}.\n  try:  deleting it, and the same command again"
        )
    return folder
