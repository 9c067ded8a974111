"""Write the README.md of an exported model: its origin, and how to serve it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from coupler.builtin.trackers.jsonl import MAX_BYTES
from coupler.config.schema import RunConfig
from coupler.interfaces import Head
from coupler.plugins.backend import Kind
from coupler.plugins.manager import Plugins
from coupler.run.provenance import installed
from coupler.system.files import DamagedFile, json_line, read_bytes
from coupler.worker.spec import WorkerSpec

MEASURES = {
    "reward/mean": "reward of samples",
    "eval/reward": "reward on held-out rows",
    "eval/loss": "loss on held-out rows",
    "loss": "loss",
}
"""Numbers of a run that a card has, by their names in ``metrics.jsonl``."""


def model_card(
    config: RunConfig, plugins: Plugins, run_dir: Path, spec: WorkerSpec, step: int | None = None
) -> str:
    """Return the text of the card, with the front matter that model hubs read.

    Args:
        run_dir: the folder of the run, whose ``metrics.jsonl`` is read if it is there.
        spec: the role whose model it is.
        step: the steps that it was trained for. None is all of them.
    """
    algorithm = config.algorithm.name
    rows = {
        "trained from": f"`{config.model.path}`",
        "algorithm": algorithm,
        "steps": str(config.steps if step is None else step),
        "data": ", ".join(f"`{source}`" for source in config.data.sources),
        "reward": ", ".join(f"`{one.target}`" for one in config.reward.named.values()),
        "engine": config.engine.name,
        "rollout": config.rollout.name if config.rollout else "",
        **measured(run_dir / "metrics.jsonl", step),
        "versions": _versions(config, plugins),
    }
    lines = [f"| {name} | {_cell(value)} |" for name, value in rows.items() if value]
    front = ["---", "library_name: transformers", f"tags: [coupler, {algorithm}]", "---"]
    title = f"# {run_dir.resolve().name}, {spec.role}"
    table = ["| | |", "|---|---|", *lines]

    commands = serving(plugins, "THIS_FOLDER")
    answers = commands and spec.model.head is Head.LM
    served = ["", "```", *commands, "```"] if answers else []
    ended = ["", "`config.yaml` and `run.json` of the run have the rest."]
    return "\n".join([*front, "", title, "", *table, *served, *ended, ""])


def serving(plugins: Plugins, folder: str | Path) -> list[str]:
    """Return the commands of installed rollouts that serve an exported policy."""
    declared = plugins.declared(Kind.ROLLOUT).values()
    commands = [" ".join(each.serves.split()) for each in declared]
    typed = shlex.quote(str(folder))
    return [command.replace("{folder}", typed) for command in commands if command]


def measured(path: Path, step: int | None = None) -> dict[str, str]:
    """Return first and last value of each of :data:`MEASURES`, up to a step.

    A policy's loss says nothing, so that the loss is left out beside a reward.
    """
    found: dict[str, list[float]] = {}
    for line in _lines(path):
        at = line.get("step")
        if not isinstance(at, int) or (step is not None and at > step):
            continue
        for name, label in MEASURES.items():
            if isinstance(value := line.get(name), int | float):
                found.setdefault(label, []).append(value)
    if MEASURES["reward/mean"] in found:
        found.pop(MEASURES["loss"], None)
    return {label: f"{each[0]:.4g} first, {each[-1]:.4g} last" for label, each in found.items()}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file. A damaged line has none, and no file has
    no lines.
    """
    try:
        text = read_bytes(path, MAX_BYTES).decode(errors="replace")
    except DamagedFile:
        return

    for line in text.splitlines():
        value = json_line(line)
        if value is not None:
            yield value


def _versions(config: RunConfig, plugins: Plugins) -> str:
    """Return the versions of core and of what the run's backends were tested with."""
    chosen = {Kind.ENGINE: config.engine, Kind.ROLLOUT: config.rollout}
    tested = [plugins.get(kind, each.name).tested for kind, each in chosen.items() if each]
    found = installed()
    others = [name for name in sorted({*chain.from_iterable(tested)}) if name in found]
    return ", ".join(f"{name} {found[name]}" for name in ("coupler-core", *others))


def _cell(text: str) -> str:
    """Return text that stays in its cell of a table."""
    return " ".join(text.replace("|", "\\|").split())
