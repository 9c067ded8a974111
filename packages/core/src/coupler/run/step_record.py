"""Record what a step trained on, so that one stage of it can run again alone: see ``coupler replay``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coupler.batch import Batch
from coupler.errors import CouplerError
from coupler.metrics import Metrics, values
from coupler.run.format import FORMAT, KEY, check_format
from coupler.system.files import writing

BATCH, NUMBERS, ABOUT = "batch.npz", "trained.json", "record.json"


@dataclass(frozen=True, slots=True)
class Recorder:
    """Writes ``record/step_12/`` after every so many steps: the batch with all its columns, and what training gave."""

    folder: Path
    every_steps: int  # 0: never

    def write(self, step: int, batch: Batch, trained: Metrics) -> None:
        if not self.every_steps or step % self.every_steps:
            return
        folder = self.folder / f"step_{step}"
        part = folder.with_suffix(".part")
        with writing(f"the record {folder}"):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            batch.save(part / BATCH)
            (part / NUMBERS).write_text(json.dumps(values(trained)))
            (part / ABOUT).write_text(json.dumps({KEY: FORMAT}))
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)


def steps(folder: Path) -> list[int]:
    """Those that were recorded."""
    return sorted(int(p.name.removeprefix("step_")) for p in folder.glob("step_*") if p.suffix != ".part")


def read(folder: Path, step: int) -> tuple[Batch, Mapping[str, float]]:
    """The batch of ``step`` and the numbers of training on it.

    Raises:
        CouplerError: it was not recorded, or by a newer release in a format of its own.
    """
    path = folder / f"step_{step}"
    if not path.is_dir():
        raise CouplerError(
            f"{folder.parent} has no record of step {step}.\n"
            f"  it has:  {', '.join(map(str, steps(folder))) or 'none; set record.every_steps'}"
        )
    about = path / ABOUT
    check_format(json.loads(about.read_text()) if about.exists() else {}, about)
    return Batch.load(path / BATCH), json.loads((path / NUMBERS).read_text())
