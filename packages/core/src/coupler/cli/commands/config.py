"""Print the resolved configuration, or explain its options: ``coupler config``."""

from __future__ import annotations

import argparse

from coupler.cli.composing import composed
from coupler.cli.parser import Parser
from coupler.config.compose import dump_yaml
from coupler.config.schema import Job
from coupler.run.explain import differences, explain


def add_arguments(parser: Parser) -> None:
    parser.add_config()
    parser.add_argument("--diff-default", action="store_true", help="only what is not the default")


def run(arguments: argparse.Namespace) -> None:
    asked = arguments.overrides[:1] == ["explain"]
    keys = [text for text in arguments.overrides[1:] if "=" not in text] if asked else []
    arguments.overrides = [text for text in arguments.overrides[asked:] if text not in keys]
    found, _ = composed(arguments, Job.TRAIN, complete=False)

    if asked:
        print("\n\n".join(explain(found, key) for key in keys or [""]))
    elif arguments.diff_default:
        print(differences(found))
    else:
        print(dump_yaml(found.config).rstrip())
