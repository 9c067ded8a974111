"""Say what a configuration amounts to, and what memory it takes."""

from __future__ import annotations

from pathlib import Path

from coupler.config.schema import Job, RunConfig
from coupler.data import load_rows
from coupler.errors import CouplerError
from coupler.plugins.manager import Plugins
from coupler.run.memory_plan import plan_memory
from coupler.run.memory_text import render
from coupler.run.plan import make_plan
from coupler.run.row_form import columns_of


def report(config: RunConfig, plugins: Plugins, job: Job, device_gib: float | None) -> str:
    """Return the plan of a job, and with a number of GiB its memory.

    Args:
        device_gib: memory of one GPU. 0 takes that of this machine, and None leaves
            memory out.

    Raises:
        CouplerError: the configuration contradicts itself, or a model cannot be
            described.
    """
    if device_gib is not None and device_gib < 0:
        raise CouplerError(f"--device-gib must be above 0, got {device_gib:g}.")
    data = config.data
    columns = columns_of(config, plugins, job)
    there = all(Path(source).exists() for source in data.sources) or config.epochs
    num_rows = len(load_rows(data, columns=columns)) if data.source and there else None
    plan = make_plan(config, num_rows, plugins, job=job)

    if device_gib is None:
        return plan.render()
    return f"{plan.render()}\n\n{render(plan_memory(config, plan, device_gib))}"
