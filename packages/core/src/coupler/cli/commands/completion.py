"""Print a script that lets a shell complete commands: ``coupler completion``."""

from __future__ import annotations

import argparse

from coupler.cli.parser import Parser, make_parser
from coupler.system.imports import present


def add_arguments(parser: Parser) -> None:
    parser.description = (
        "Print a script that completes commands and their flags, for example for bash:  "
        "coupler completion bash > ~/.local/share/bash-completion/completions/coupler"
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))


def run(arguments: argparse.Namespace) -> None:
    shtab = present("shtab", "coupler-core[completion]")
    print(shtab.complete(make_parser(), arguments.shell))
