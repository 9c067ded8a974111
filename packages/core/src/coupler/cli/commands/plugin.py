"""Write the package of a new plugin: ``coupler plugin new``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from coupler.cli.parser import Parser
from coupler.cli.shipped import shipped, write_new
from coupler.errors import CouplerError
from coupler.plugins.manager import Plugins

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
PROJECT = re.compile(r'^name = "coupler-(\w+)-(\w+)"$', re.MULTILINE)


def add_arguments(parser: Parser) -> None:
    actions = parser.add_subparsers(required=True, metavar="new")
    new = actions.add_parser(
        "new",
        help="write a package that passes its conformance kit at once",
        description="Write the package of a plugin. It is an example of this kind, with your "
        "name, and passes the conformance kit at once.",
    )
    new.add_argument("plugin", metavar="NAME", help="lower-case letters, digits and _")

    kinds = "reward, algorithm, rollout, engine, sharding, tracker or transport"
    new.add_argument("--kind", required=True, help=kinds)
    new.add_argument("--out", type=Path, metavar="DIR", help="default: coupler-KIND-NAME")


def run(arguments: argparse.Namespace) -> None:
    name, kind = arguments.plugin, arguments.kind
    examples = _examples()
    if kind not in examples:
        raise CouplerError(f"--kind {kind} is none.\n  it may be:  {', '.join(sorted(examples))}")
    if not NAME.fullmatch(name):
        raise CouplerError(
            f"{name!r} is no name of a plugin.\n  try:  lower-case letters, digits and _"
        )
    if owner := Plugins.load().owner_of(kind, name):
        raise CouplerError(
            f"{kind}={name} is installed already, by {owner.distribution or owner.module}.\n"
            "  try:  another NAME"
        )

    example, old = examples[kind]
    folder = arguments.out or Path(f"coupler-{kind}-{name}")
    sources = [
        path
        for path in sorted(example.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    ]
    write_new(
        {
            folder / renamed(str(path.relative_to(example)), old, name): renamed(
                path.read_text(encoding="utf-8"), old, name
            ).encode()
            for path in sources
        }
    )

    target = f"coupler_reward_{name}:score" if kind == "reward" else name
    print(
        folder,
        f"  install it:  pip install -e '{folder}[test]'",
        f"  check it:    pytest --pyargs coupler.testing.conformance --coupler {kind}={target}",
        sep="\n",
    )


def _examples() -> dict[str, tuple[Path, str]]:
    """Return the folder of an example and its name, by kind."""
    found = {}
    for project in sorted(shipped("examples").glob("plugin-*/pyproject.toml")):
        if match := PROJECT.search(project.read_text(encoding="utf-8")):
            found[match[1]] = (project.parent, match[2])
    return found


def renamed(text: str, old: str, new: str) -> str:
    """Give a plugin another name where ``old`` is a name, and no word of a sentence.

    It is one in ``coupler_rollout_old``, ``rollout=old``, ``"old"``, ``[old]``, in a
    class ``OldRollout``, and in the name of the entry point.
    """
    text = re.sub(rf'((?<=[-_="\[,])|(?<=  )){old}\b', new, text)
    text = re.sub(rf"^{old}(?=\w* = )", new, text, flags=re.MULTILINE)
    camel = "".join(part.capitalize() for part in new.split("_"))
    return re.sub(rf'\b{old.capitalize()}(?=[A-Z(:",])', camel, text)
