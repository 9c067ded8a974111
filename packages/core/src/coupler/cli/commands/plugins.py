"""List what is installed: ``coupler plugins``. No plugin is imported here."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from importlib.metadata import version

from coupler.cli.parser import Parser
from coupler.cli.table import table
from coupler.plugins.manager import CORE, Plugins
from coupler.system.log import get_logger

log = get_logger(__name__)

HEAD = ("kind", "name", "state", "distribution", "version", "capabilities")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> None:
    plugins = Plugins.load()
    rows = plugins.rows()
    if arguments.json:
        listed = {"core": version(CORE), "plugins": [asdict(row) for row in rows]}
        print(json.dumps(listed, indent=2))
        return

    body = [
        (
            row.kind or "-",
            row.name,
            row.state,
            row.distribution or "-",
            row.version or "-",
            row.detail or " ".join(row.capabilities),
        )
        for row in rows
    ]
    print(table([HEAD, *body]))
    for text in (*plugins.stale, *plugins.unknown()):
        log.warning(text)
