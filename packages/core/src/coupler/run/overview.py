"""Say in which state the runs below a folder are, for ``coupler runs``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coupler.errors import CouplerError
from coupler.run.run_folder import DONE, ENDED, INTERRUPTED, read_starts
from coupler.run.run_lock import LOG, NAME, Held, held
from coupler.system.child import shortened
from coupler.system.files import DamagedFile, json_line, reading
from coupler.system.tree import value_at
from coupler.system.yaml_file import read_yaml

# A folder with one of these is that of a run.
MARKS = ("run.json", "metrics.jsonl", LOG, NAME)
MAX_DEPTH = 4
TAIL_BYTES = 1 << 18
REWARDS = ("reward/mean", "eval/reward")


@dataclass(frozen=True, slots=True)
class Overview:
    """Holds what is known of a run. What is not known is empty or None.

    Attributes:
        state: running, done, failed, interrupted, killed or damaged.
        steps: of the whole run.
        reward: the mean reward of the last step that has one.
        age_s: seconds since something was written.
        problem: the reason where it is damaged or has failed.
    """

    folder: Path
    state: str = ""
    algorithm: str = ""
    model: str = ""
    step: int | None = None  # None of an evaluation
    steps: int | None = None
    reward: float | None = None
    age_s: float = 0.0
    problem: str = ""


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the run folders in ``folder``, itself included, in the order of their
    names. Evaluations in the folder of a run are runs too, and so are runs elsewhere
    to which a link leads.
    """
    for path, names, _ in os.walk(folder, followlinks=True):
        here = Path(path)
        is_run = any(os.path.lexists(here / mark) for mark in MARKS)
        if is_run:
            yield here

        deep = len(here.relative_to(folder).parts) >= MAX_DEPTH
        names[:] = sorted(
            name
            for name in names
            if not deep and name[0] != "." and (not is_run or name.startswith("eval_"))
            if not _leads_back(here / name)
        )


def _leads_back(path: Path) -> bool:
    """Tell whether a link leads to a folder that it lies in."""
    to = os.path.realpath(path)
    return path.is_symlink() and Path(os.path.realpath(path.parent)).is_relative_to(to)


def look_at(run: Path) -> Overview:
    """Return the overview of a run folder. A damaged one has a ``problem``."""
    found = Overview(run)
    try:
        age = time.time() - max(_times(run), default=time.time())
        found = replace(found, age_s=max(age, 0.0))
        return _stated(_numbers(_configured(found)))
    except (CouplerError, OSError) as error:
        problem = str(error).splitlines()[0]
        return replace(found, state="damaged", problem=problem)


def _times(run: Path) -> Iterator[float]:
    for name in MARKS:
        if (run / name).is_file():
            yield (run / name).stat().st_mtime


def _configured(found: Overview) -> Overview:
    """Add what ``config.yaml`` says, which a run has from its first numbers on."""
    path = found.folder / "config.yaml"
    if not os.path.lexists(path):
        return found

    values = read_yaml(path)
    if not isinstance(values, dict):
        raise DamagedFile(f"{path} is damaged: it is no mapping of options.")
    steps = value_at(values, "steps")
    return replace(
        found,
        algorithm=str(value_at(values, "algorithm.name") or ""),
        model=str(value_at(values, "model.path") or ""),
        steps=steps if type(steps) is int else None,
    )


def _numbers(found: Overview) -> Overview:
    """Add step and reward from the last whole lines of ``metrics.jsonl``."""
    path = found.folder / "metrics.jsonl"
    if not os.path.lexists(path):
        return found
    if not path.is_file():
        raise DamagedFile(f"{path} is no file.")
    with reading(path), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = [line for text in file.read().split(b"\n") if (line := _line(text))]
    if not lines:
        return found

    of_run = lines[-1].get("run/steps")
    rewards = [
        value
        for line in lines
        for value in [next((line[name] for name in REWARDS if name in line), None)]
        if isinstance(value, int | float)
    ]
    return replace(
        found,
        step=None if _evaluated(found) else lines[-1]["step"],
        steps=int(of_run) if isinstance(of_run, int | float) else found.steps,
        reward=rewards[-1] if rewards else None,
    )


def _line(text: bytes) -> dict[str, Any] | None:
    """Return a line with the numbers of a step, or None of a damaged one."""
    found = json_line(text)
    return found if found and type(found.get("step")) is int else None


def _stated(found: Overview) -> Overview:
    """Add the state, and the reason of a failure as ``run.json`` has it."""
    match held(found.folder):
        case Held.BY_A_PROCESS:
            return replace(found, state="running")
        case Held.LEFT_BEHIND:
            return replace(found, state="killed")
    complete = found.step is not None and found.steps is not None and found.step >= found.steps
    ended = next((start.get(ENDED) for start in read_starts(found.folder)[-1:]), None)
    # A run may be done before its last step, by eval.patience.
    if complete or _evaluated(found) or ended == DONE:
        return replace(found, state=DONE)

    if ended == INTERRUPTED:
        return replace(found, state=INTERRUPTED)
    why = shortened(ended) if isinstance(ended, str) else ""
    return replace(found, state="failed", problem=why)


def _evaluated(found: Overview) -> bool:
    """Tell whether it is an evaluation that ended, which has no steps."""
    return (found.folder / "eval.jsonl").is_file()
