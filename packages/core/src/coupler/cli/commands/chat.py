"""Talk to a model in the terminal, or through a pipe: ``coupler chat``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from coupler.cli.composing import composed, config_of_run, quoted
from coupler.cli.exported import exported
from coupler.cli.parser import Parser
from coupler.config.overrides import read_file
from coupler.config.schema import Job
from coupler.errors import CouplerError
from coupler.jobs import chat
from coupler.plugins.backend import Kind
from coupler.plugins.manager import Plugins
from coupler.run.opinion_checks import OWN_WEIGHTS
from coupler.system.plain_values import holds_text
from coupler.system.terminal import harmless

YOU = "> "


def add_arguments(parser: Parser) -> None:
    parser.description = (
        "Talk to a model: a line is a message, an empty line starts another conversation, and "
        "the end of the file ends it. eval.temperature, eval.top_p and eval.max_tokens say how "
        "answers are sampled."
    )
    parser.add_argument("model", metavar="RUN|MODEL", help="folder of a run, or of a model")
    parser.add_argument("--rollout", metavar="NAME", help="default: the run's, or any installed")
    parser.add_argument("--step", type=int, metavar="N", help="of a run: its checkpoint N")
    parser.add_options("options that differ from the run's, or from the defaults")


def run(arguments: argparse.Namespace) -> None:
    folder, written = Path(arguments.model), {}
    model, arguments.config = arguments.model, None
    if os.path.isfile(folder / "config.yaml"):
        model, arguments.config = str(exported(folder, arguments.step)), str(config_of_run(folder))
        written = read_file(arguments.config)
    elif arguments.step is not None:
        raise CouplerError(f"{folder} is no run folder, and --step {arguments.step} needs one.")
    elif ":" not in model and not os.path.isfile(folder / "config.json"):
        raise CouplerError(
            f"{folder} is no run folder, which has config.yaml, and no model, which has "
            "config.json.\n  try:  coupler runs, which lists the runs below runs/"
        )

    rollout = arguments.rollout or ("" if written.get("rollout") else _any_rollout())
    chosen = [f"rollout={rollout}"] if rollout else []
    alone = ["executor=local", "max_staleness=0", f"model.path={quoted(model)}"]
    arguments.overrides = [*alone, *chosen, *arguments.overrides]
    found, plugins = composed(arguments, Job.EVAL, complete=False)
    for answer in chat(found, plugins, _texts()):
        print(harmless(answer, lines=True), flush=True)


def _any_rollout() -> str:
    """Return the first installed rollout that loads weights of a folder."""
    able = [
        name
        for name, declared in sorted(Plugins.load().complete().declared(Kind.ROLLOUT).items())
        if OWN_WEIGHTS in declared.capabilities and "model:toy" not in declared.capabilities
    ]
    if not able:
        raise CouplerError(
            f"no rollout with {OWN_WEIGHTS} is installed.\n"
            "  try:  pip install 'coupler-core[fsdp]', or --rollout NAME"
        )
    return able[0]


def _texts() -> Iterator[str]:
    """Yield the lines that come in.

    Raises:
        CouplerError: one is no text. In some locales that shows only here.
    """
    try:
        for line in _lines():
            if not holds_text(line):
                raise UnicodeError
            yield line

    except UnicodeError:
        raise CouplerError(
            "a line of the input has NUL, or bytes that are not UTF-8.\n"
            "  try:  iconv -t UTF-8 FILE | coupler chat RUN"
        ) from None


def _lines() -> Iterator[str]:
    """Yield what is typed or piped in, one line at a time."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\r\n")
        return

    print("an empty line starts another conversation; Ctrl-D ends", file=sys.stderr)
    while True:
        try:
            yield input(YOU)
        except EOFError:
            print(end=os.linesep)
            return
