"""Run one stage of a recorded step again: ``coupler replay``."""

from __future__ import annotations

import argparse

from coupler.cli.composing import composed_of_run
from coupler.cli.parser import Parser
from coupler.jobs import Stage, replay


def add_arguments(parser: Parser) -> None:
    parser.add_run()
    parser.add_argument("--step", type=int, required=True, help="recorded by record.every_steps")
    parser.add_argument("--stage", choices=[*map(str, Stage)], default="train")


def run(arguments: argparse.Namespace) -> None:
    found, plugins = composed_of_run(arguments)
    stage = Stage(arguments.stage)
    compared = replay(found, plugins, arguments.run, arguments.step, stage)
    for name, (then, now) in compared.items():
        print(f"{name:28} recorded {then:<14.7g} now {now:<14.7g} difference {now - then:.2g}")
