"""Compare runs on one page of HTML: ``coupler report``."""

from __future__ import annotations

import argparse
from pathlib import Path

from coupler.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of the runs")
    parser.add_argument("--html", type=Path, metavar="FILE", required=True, help="to write")


def run(arguments: argparse.Namespace) -> None:
    from coupler.jobs.report import report

    report(arguments.runs, arguments.html)
    print(arguments.html)
