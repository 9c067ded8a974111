"""Print what a configuration amounts to: ``coupler plan``. It takes no device."""

from __future__ import annotations

import argparse
from pathlib import Path

from coupler.cli.composing import composed
from coupler.cli.parser import Parser
from coupler.config.schema import Job
from coupler.data import load_rows
from coupler.run.plan import make_plan
from coupler.run.row_form import columns_of


def add_arguments(parser: Parser) -> None:
    parser.add_config()
    parser.add_argument("--job", choices=("train", "sft"), default="train", help="that it is for")


def run(arguments: argparse.Namespace) -> None:
    job = Job(arguments.job)
    found, plugins = composed(arguments, job)
    data = found.config.data
    columns = columns_of(found.config, plugins, job)

    there = all(Path(source).exists() for source in data.sources) or found.config.epochs
    num_rows = len(load_rows(data, columns=columns)) if data.source and there else None
    print(make_plan(found.config, num_rows, plugins, job=job).render())
