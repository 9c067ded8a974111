"""Print what a configuration amounts to: ``coupler plan``. It takes no device."""

from __future__ import annotations

import argparse
import os

from coupler.cli.composing import composed
from coupler.cli.parser import Parser
from coupler.config.schema import Job
from coupler.data import load_rows
from coupler.errors import CouplerError
from coupler.run.memory_plan import plan_memory
from coupler.run.memory_text import render
from coupler.run.plan import make_plan
from coupler.run.row_form import columns_of

MAX_GIB = 1e6


def add_arguments(parser: Parser) -> None:
    parser.add_config()
    parser.add_argument("--job", choices=("train", "sft"), default="train", help="that it is for")
    parser.add_argument("--memory", action="store_true", help="estimate device memory, too")
    parser.add_argument("--device-gib", type=float, default=0, help="memory of one GPU; --memory")


def run(arguments: argparse.Namespace) -> None:
    job, gib = Job(arguments.job), arguments.device_gib
    if not 0 <= gib < MAX_GIB:
        raise CouplerError(f"--device-gib must be above 0 and below {MAX_GIB:g}, got {gib:g}.")
    found, plugins = composed(arguments, job)
    data = found.config.data
    columns = columns_of(found.config, plugins, job)

    there = all(os.path.exists(source) for source in data.sources) or found.config.epochs
    num_rows = len(load_rows(data, columns=columns)) if data.source and there else None
    plan = make_plan(found.config, num_rows, plugins, job=job)
    print(plan.render())
    if arguments.memory or gib:
        print(f"\n{render(plan_memory(found.config, plan, gib))}")
