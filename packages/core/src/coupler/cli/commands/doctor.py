"""Say what is wrong with this machine, a configuration or its rows: ``coupler
doctor``.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from coupler.cli.parser import Parser
from coupler.config.compose import compose
from coupler.doctor import Verdict, diagnose, examine, render
from coupler.plugins.manager import Plugins

DATA = "data"  # coupler doctor data


def add_arguments(parser: Parser) -> None:
    parser.add_config()
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    about_data = DATA in arguments.overrides
    arguments.overrides = [text for text in arguments.overrides if text != DATA]
    plugins, config = Plugins.load(), None
    if arguments.config or arguments.overrides or about_data:
        config = compose(plugins, arguments.overrides, arguments.config, complete=False).config

    findings = []
    asked = examine(config, plugins) if config and about_data else diagnose(plugins, config)
    for finding in asked:
        findings.append(finding)
        if not arguments.json:
            print(render(finding), flush=True)

    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    wrong = any(finding.verdict is Verdict.PROBLEM for finding in findings)
    return wrong * (2 if about_data else 1)
