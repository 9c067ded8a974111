"""Print the conversations of a step: ``coupler show``."""

from __future__ import annotations

import argparse

from coupler.cli.composing import composed_of_run
from coupler.cli.parser import Parser
from coupler.jobs import show


def add_arguments(parser: Parser) -> None:
    parser.add_run()
    parser.add_argument("--step", type=int, help="default: the last that was kept")
    parser.add_argument("--group", type=int, help="default: every prompt group")


def run(arguments: argparse.Namespace) -> None:
    found, _ = composed_of_run(arguments)
    for line in show(found, arguments.run, arguments.step, arguments.group):
        print(line)
