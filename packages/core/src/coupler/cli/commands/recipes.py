"""List recipes and the presets of plugins, and copy a recipe: ``coupler recipes``."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from coupler.cli.parser import Parser
from coupler.cli.shipped import shipped, write_new
from coupler.cli.table import table
from coupler.errors import CouplerError
from coupler.plugins.backend import Kind
from coupler.plugins.manager import Plugins
from coupler.system.beside import found_beside
from coupler.system.terminal import harmless
from coupler.system.tree import flatten, value_at
from coupler.system.yaml_file import read_yaml
from coupler.system.yaml_layers import PRESET

COMMAND = re.compile(r"(coupler (?:train|sft|eval) --config) recipes/\S+(.*)")
SHOWN = (Kind.ENGINE, Kind.ROLLOUT, Kind.ALGORITHM, Kind.ENVIRONMENT)


def add_arguments(parser: Parser) -> None:
    actions = parser.add_subparsers(metavar="cp", dest="action")
    copy = actions.add_parser(
        "cp",
        help="copy a recipe with the files that it names",
        description="Copy a recipe, or a folder of them, with the files that it names.",
    )
    copy.add_argument("recipe", metavar="NAME", help="of those that coupler recipes lists")
    copy.add_argument("folder", nargs="?", type=Path, default=Path(), metavar="DIR")


def run(arguments: argparse.Namespace) -> None:
    recipes = shipped("recipes")
    found = {str(path.relative_to(recipes).with_suffix("")): path for path in _files(recipes)}
    if arguments.action == "cp":
        _copy(arguments.recipe.rstrip("/"), arguments.folder, recipes, found)
        return

    plugins = Plugins.load().complete()
    rows = [(name, _state(path, plugins), _about(_text(path))) for name, path in found.items()]
    for name, texts in sorted(plugins.presets(PRESET).items()):
        rows += [(f"{PRESET}={name}", "", _about(text)) for _, text in texts[:1]]
    print(table([("recipe", "needs", "about"), *rows]))


def _files(recipes: Path) -> list[Path]:
    return sorted(recipes.rglob("*.yaml"))


def _copy(name: str, folder: Path, recipes: Path, found: dict[str, Path]) -> None:
    chosen = [path for each, path in found.items() if name in (each, each.rpartition("/")[0])]
    if not chosen:
        close = get_close_matches(name, found, n=1)
        meant = f"coupler recipes cp {close[0]}" if close else "coupler recipes, which lists all"
        raise CouplerError(f"there is no recipe {name}.\n  try:  {meant}")

    files = sorted({file for path in chosen for file in (path, *_named(path))})
    copies = {folder / file.relative_to(recipes): file for file in files}
    write_new({copy: file.read_bytes() for copy, file in copies.items()})

    print(*copies, sep="\n")
    for path in chosen:
        copy = shlex.quote(str(folder / path.relative_to(recipes)))
        for before, after in COMMAND.findall(_head(_text(path))):
            print(f"  run it:  {before} {copy}{after}")


def _named(path: Path) -> Iterator[Path]:
    """Yield the files beside a recipe that it names."""
    for key, value in flatten(read_yaml(path)).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and (name := found_beside(key, text, path.parent)[0]):
                yield Path(name)


def _state(path: Path, plugins: Plugins) -> str:
    """Name what a recipe chooses and is not installed."""
    values: dict[str, Any] = read_yaml(path)
    chosen = [(kind, value_at(values, f"{kind}.name")) for kind in SHOWN]
    return ", ".join(
        f"{kind}={name}" for kind, name in chosen if name and name not in plugins.declared(kind)
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _head(text: str) -> str:
    """Return the comment at the start of a recipe, without its hashes."""
    lines = text.splitlines()
    end = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "\n".join(line.removeprefix("#").strip() for line in lines[:end])


def _about(text: str) -> str:
    """Return the first sentence of a recipe."""
    return harmless(_head(text).replace("\n", " ").partition(". ")[0].rstrip("."))
