"""Read what a report shows of a run folder. Nothing in the folder is touched."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coupler.builtin.trackers.jsonl import MAX_BYTES
from coupler.errors import CouplerError
from coupler.run import samples
from coupler.run.resume import is_started, read_config
from coupler.run.run_folder import read_starts
from coupler.system.files import DamagedFile, json_line, read_bytes
from coupler.system.tree import flatten
from coupler.system.words import count
from coupler.system.yaml_file import parse_yaml

# Larger metrics.jsonl files hold more steps than a page can show.
# Steps and values beyond these are damage. Sums and differences of smaller ones are
# finite.
MAX_STEP, MAX_VALUE = 1 << 53, 1e300


@dataclass(frozen=True, slots=True)
class Run:
    """A run as its folder tells it.

    Attributes:
        name: the folder's name, or its path where two runs have one name.
        config: the options by their full keys.
        steps: the numbers of each step by their names, in the order of the steps. None
            stands for a number that was not finite.
        samples: what the policy wrote in the last step whose text was kept.
        started: the time of the first start as ``run.json`` has it, or an empty text.
        notes: sentences on damage that the rest of the run survives.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    steps: dict[int, dict[str, float | None]]
    samples: list[dict[str, Any]] = field(default_factory=list)
    started: str = ""
    notes: list[str] = field(default_factory=list)

    def column(self, metric: str) -> Iterator[tuple[int, float | None]]:
        """Yield step and value of one metric, for the steps that have it."""
        for step, numbers in self.steps.items():
            if metric in numbers:
                yield step, numbers[metric]


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Read the runs in ``folders``, each once, and name those that cannot be shown.

    Returns:
        The runs, and one sentence for each folder that was left out.

    Raises:
        CouplerError: none of them can be shown.
    """
    found = {os.path.realpath(folder): folder for folder in folders}
    distinct, names = list(found.values()), [os.path.basename(path) for path in found]
    runs, problems = [], []
    for folder, name in zip(distinct, names, strict=True):
        try:
            runs.append(read_run(folder, name if names.count(name) == 1 else str(folder)))
        except CouplerError as error:
            problems.append(_sentence(error))

    if not runs:
        raise CouplerError("\n".join(problems))
    return runs, [f"Left out: {problem}" for problem in problems]


def read_run(folder: Path, name: str) -> Run:
    """Read one run.

    Raises:
        CouplerError: the folder holds no run, no step, or files that cannot be read.
    """
    if not is_started(folder):
        raise CouplerError(f"{folder} is no run folder: it has no config.yaml.")

    config = flatten(parse_yaml(read_config(folder), folder / "config.yaml"))
    starts = read_starts(folder)
    steps, notes = _read_steps(folder / "metrics.jsonl")
    try:
        kept = samples.steps(folder / samples.FOLDER)
        written = samples.read(folder / samples.FOLDER, kept[-1]) if kept else []
        if any(_finite(line["reward"]) is None for line in written):
            raise DamagedFile(f"{folder / samples.FOLDER} is damaged: a reward is no number.")
    except CouplerError as error:
        written, notes = [], [*notes, f"{_sentence(error)} No sample of it is shown."]

    started = str(starts[0].get("started", "")) if starts else ""
    return Run(name, folder, config, steps, written, started, notes)


def _read_steps(path: Path) -> tuple[dict[int, dict[str, float | None]], list[str]]:
    """Return the numbers of each step. The last line of a step wins, as in a resumed
    run.
    """
    if not os.path.exists(path):
        raise DamagedFile(f"{path} is missing: the run had no jsonl in trackers.")
    lines = read_bytes(path, MAX_BYTES).split(b"\n")
    found = [_numbers(line) for line in lines]
    steps = dict(filter(None, found))
    if not steps:
        raise DamagedFile(f"{path} has no step yet.")

    # What follows the last line feed is empty, or a line that a kill cut off.
    damaged = sum(numbers is None for numbers in found[:-1])
    said = f"{path} has {count(damaged, 'damaged line')}, which the page leaves out."
    return dict(sorted(steps.items())), [said] if damaged else []


def _numbers(line: bytes) -> tuple[int, dict[str, float | None]] | None:
    """Return step and numbers of a line, or None where it is damaged."""
    values = json_line(line) or {}
    step = values.pop("step", None)
    if type(step) is not int or not 0 <= step < MAX_STEP:
        return None
    return step, {name: _finite(value) for name, value in values.items()}


def _finite(value: Any) -> float | None:
    number = type(value) in (int, float) and abs(value) < MAX_VALUE
    return float(value) if number else None


def _sentence(error: CouplerError) -> str:
    return str(error).splitlines()[0]
