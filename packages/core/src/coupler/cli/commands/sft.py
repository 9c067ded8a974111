"""Train on examples: ``coupler sft``. torchrun may start its ranks."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

from coupler.cli.composing import check, composed
from coupler.cli.parser import Parser
from coupler.config.compose import Composed
from coupler.config.overrides import read_files
from coupler.config.presets import preset_text
from coupler.config.schema import Job
from coupler.errors import CouplerError
from coupler.executors.torchrun.launch import Launch, launch_of
from coupler.plugins.manager import Plugins
from coupler.system.log import get_logger

log = get_logger(__name__)


def add_arguments(parser: Parser) -> None:
    parser.add_config()
    parser.add_multirun()


def run(arguments: argparse.Namespace) -> int | None:
    if arguments.multirun:
        from coupler.cli.sweep import sweep

        return sweep(arguments, Job.SFT)
    launch = launch_of(os.environ)
    if launch and launch.rank:
        return _serve(arguments, launch)
    found, plugins = _composed_for(launch, arguments)
    check(found, plugins, Job.SFT)
    from coupler.jobs import supervise

    supervise(found, plugins)
    return None


def _composed_for(launch: Launch | None, arguments: argparse.Namespace) -> tuple[Composed, Plugins]:
    """Compose the configuration, with the processes of torchrun as the ranks of the
    engine, where it started them.
    """
    if launch:
        files = read_files(arguments.config, text_of=partial(preset_text, Plugins.load()))
        arguments.overrides = launch.overrides(arguments.overrides, files.values)
    return composed(arguments, Job.SFT)


def _serve(arguments: argparse.Namespace, launch: Launch) -> int:
    """Be a rank of the engine. Rank 0 says what is wrong with the configuration."""
    from coupler.executors.torchrun.host import serve

    log.setLevel("ERROR")
    try:
        config = _composed_for(launch, arguments)[0].config
    except CouplerError:
        return 2
    serve(launch, Path(config.run_dir).absolute(), config.waits.deadline_s)
    return 0
