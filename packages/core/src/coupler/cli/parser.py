"""Read the arguments of a command. The table of commands is here."""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import is_dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from coupler.errors import CouplerError
from coupler.plugins.manager import CORE

# A command's module is that of its name in ``commands/``, with add_arguments and run.
COMMANDS = {
    "train": "reinforcement learning",
    "sft": "supervised fine-tuning",
    "eval": "sample held-out prompts and score them",
    "plan": "print what a configuration amounts to; takes no device",
    "doctor": "check this machine and a configuration; 'doctor data' examines the rows of one",
    "config": "print the resolved configuration; 'config explain KEY' explains one",
    "replay": "run one stage of a recorded step again, in this process",
    "show": "print the conversations of a step",
    "export": "write a checkpoint's model in Hugging Face layout",
    "chat": "talk to the model of a run or a folder",
    "report": "compare runs on one page of HTML",
    "runs": "list the runs in a folder: state, step, reward, age",
    "init": "write a recipe, a reward and rows for a first run",
    "recipes": "list the recipes that are installed; 'recipes cp NAME' copies one",
    "plugins": "list what is installed, and what does not load",
    "plugin": "'plugin new NAME --kind KIND' writes the package of a plugin",
    "completion": "print a script that lets a shell complete commands",
}
LEVELS = (
    ("-v", "debug", "show more messages: COUPLER_LOG=debug"),
    ("-q", "warning", "show warnings and numbers alone: COUPLER_LOG=warning"),
)
HELP = "\n  try:  coupler COMMAND --help; options are written key=value"
OVERRIDES = "overrides"  # where the key=value arguments of a command are


class Parser(argparse.ArgumentParser):
    """A parser that ends its help with the way to the options of a run, which are no
    flags.
    """

    def error(self, message: str) -> NoReturn:
        """Raises CouplerError: always. The usage of argparse is no sentence."""
        raise CouplerError(f"{message}.\n  try:  {self.prog} --help")

    def format_help(self) -> str:
        if any(action.dest == OVERRIDES for action in self._actions):
            self.epilog = _way_to_options()
            self.formatter_class = argparse.RawDescriptionHelpFormatter
        return super().format_help()

    def add_options(self, text: str = "options; they win over the file's") -> None:
        """Take key=value arguments, in any place."""
        self.add_argument(OVERRIDES, nargs="*", metavar="key=value", help=text)

    def add_config(self) -> None:
        """Take a file of options, and options."""
        self.add_argument("--config", metavar="FILE", action=_Once, help="YAML file of options")
        self.add_options()

    def add_multirun(self) -> None:
        """Take a sweep: options with several values."""
        self.add_argument(
            "--multirun",
            "-m",
            action="store_true",
            help="run every combination of options that have several values: seed=1,2",
        )

    def add_run(self) -> None:
        """Take the folder of a run, and options that differ from the run's."""
        self.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
        self.add_options("options that differ from the run's")


class _Once(argparse.Action):
    """Take an argument that a command has once: of two files, one would be lost."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            raise CouplerError(
                f"{option_string} is given twice.\n"
                "  try:  one file, which names the others:  defaults: [FILE, FILE]"
            )

        setattr(namespace, self.dest, values)


def make_parser(only: str = "") -> Parser:
    """Make the parser of the command line.

    Args:
        only: the command whose module is imported. Empty imports those of all.
    """
    parser = Parser(
        prog="coupler",
        description="Post-train language models.",
        epilog="coupler COMMAND --help says more, and how to list the options of a run.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"coupler {version(CORE)}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)

    for name, text in COMMANDS.items():
        of_command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        level = of_command.add_mutually_exclusive_group()
        for short, full, means in LEVELS:
            level.add_argument(
                short, dest="level", action="store_const", const=full, default="", help=means
            )
        if only in ("", name):
            module = import_module(f"coupler.cli.commands.{name}")
            module.add_arguments(of_command)
            of_command.set_defaults(command=module.run, name=name)
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the arguments. ``command`` of the answer is the function that they are for.

    Raises:
        CouplerError: the command is unknown, or does not take one of them.
    """
    asked = next((text for text in argv if not text.startswith("-")), "-")
    arguments, rest = make_parser(asked).parse_known_args(argv)

    # Overrides may stand on both sides of --config.
    for text in rest:
        if text.startswith("-"):
            hint = f"\n  write it as:  {text.lstrip('-')}" if "=" in text else HELP
            raise CouplerError(f"unknown argument {text}.{hint}")
    if rest and OVERRIDES not in arguments:
        name = arguments.name
        raise CouplerError(f"coupler {name} takes no {rest[0]}.\n  try:  coupler {name} --help")
    if rest:
        arguments.overrides += rest
    return arguments


def _way_to_options() -> str:
    from coupler.config.options import SECTIONS, TRACKER
    from coupler.config.schema import RunConfig

    chosen = [path for path in (*SECTIONS, TRACKER) if "." not in path]
    sections = [name for name, value in vars(RunConfig()).items() if is_dataclass(value)]
    others = [name for name in vars(RunConfig()) if name not in (*chosen, *sections)]
    listed = (
        ("sections", sections),
        ("sections of the chosen backends", chosen),
        ("options without a section", others),
    )
    wrapped = [
        textwrap.fill(f"{what}: {', '.join(names)}", 88, subsequent_indent="  ")
        for what, names in listed
    ]
    written = "every option is written key=value, in any order:  "
    lines = (
        written + "steps=50 sampling.max_tokens=512 engine=NAME",
        *wrapped,
        "",
        "what options mean, their defaults, and what they take:",
        "  coupler config explain                      every option",
        "  coupler config explain sampling             the options of a section",
        "  coupler config explain engine engine=NAME   the options of a backend; names: "
        "coupler plugins",
    )
    return "\n".join(lines)
