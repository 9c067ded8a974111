"""Write a checkpoint's model in Hugging Face layout: ``coupler export``."""

from __future__ import annotations

import argparse
from pathlib import Path

from coupler.cli.composing import composed_of_run
from coupler.cli.parser import Parser
from coupler.jobs import export_run
from coupler.run.model_card import serving


def add_arguments(parser: Parser) -> None:
    parser.add_run()
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: RUN/export_step_N")
    parser.add_argument("--step", type=int, help="default: the last whole checkpoint")


def run(arguments: argparse.Namespace) -> None:
    found, plugins = composed_of_run(arguments)
    out, step = export_run(found, plugins, arguments.run, arguments.step, arguments.out)
    commands = serving(plugins.complete(), out)
    print(f"{out}: the policy after step {step}", *commands, sep="\n  serve it:  ")
