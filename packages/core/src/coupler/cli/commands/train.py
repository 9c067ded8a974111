"""Train by reinforcement learning: ``coupler train``."""

from __future__ import annotations

import argparse

from coupler.cli.composing import checked
from coupler.cli.parser import Parser
from coupler.config.schema import Job


def add_arguments(parser: Parser) -> None:
    parser.add_config()
    parser.add_multirun()


def run(arguments: argparse.Namespace) -> int | None:
    if arguments.multirun:
        from coupler.cli.sweep import sweep

        return sweep(arguments, Job.TRAIN)
    found, plugins = checked(arguments, Job.TRAIN)
    from coupler.jobs import train

    train(found, plugins)
    return None
