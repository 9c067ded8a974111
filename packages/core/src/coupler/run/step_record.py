"""Record what a step trained on.

``coupler replay`` runs one stage of such a step again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coupler.batch import Batch
from coupler.errors import CouplerError
from coupler.metrics import Metrics, values
from coupler.run.format import FORMAT, KEY, check_format, load_batch, number_of
from coupler.run.manifest import RUN
from coupler.system.files import DamagedFile, read_json, remove, writing
from coupler.system.hashing import hash_files
from coupler.system.log import get_logger

log = get_logger(__name__)

BATCH, NUMBERS, ABOUT = "batch.npz", "trained.json", "record.json"


@dataclass(frozen=True, slots=True)
class Recorder:
    """Writes ``record/step_12/`` after every so many steps.

    The folder holds the batch with all its columns, and the numbers of training on it.
    """

    folder: Path
    # 0 is never.
    every_steps: int
    # The id of the run.
    run: str = ""

    def write(self, step: int, batch: Batch, trained: Metrics) -> None:
        if not self.every_steps or step % self.every_steps:
            return

        folder = self.folder / f"step_{step}"
        if self._is_foreign(folder):
            log.warning(
                f"step {step} is not recorded: {folder} is the record of another run. Is "
                f"{self.folder} a link to that run's?"
            )
            return
        part = folder.with_suffix(".part")
        with writing(f"the record {folder}"):
            remove(part)
            part.mkdir(parents=True)
            batch.save(part / BATCH)
            (part / NUMBERS).write_text(json.dumps(values(trained)))
            about = {KEY: FORMAT, "step": step, RUN: self.run, "sha256": _hashes(part)}
            (part / ABOUT).write_text(json.dumps(about))

            remove(folder)
            part.rename(folder)

    def _is_foreign(self, folder: Path) -> bool:
        """Tell whether another run recorded what is there."""
        try:
            about = read_json(folder / ABOUT)
        except DamagedFile:
            return False
        return about.get(RUN, self.run) != self.run


def steps(folder: Path) -> list[int]:
    """Return the steps that were recorded."""
    return sorted(number for path in folder.glob("step_*") if (number := number_of(path)))


def read(folder: Path, step: int, run: str = "") -> tuple[Batch, Mapping[str, float]]:
    """Return the batch of ``step`` and the numbers of training on it.

    Args:
        run: the id of the run that recorded it. Empty where it is not known.

    Raises:
        CouplerError: the step was not recorded, its record is damaged or of another
            run, or a newer release wrote it in a format of its own.
    """
    path = folder / f"step_{step}"
    if not path.is_dir():
        raise CouplerError(
            f"{folder.parent} has no record of step {step}.\n"
            f"  it has:  {', '.join(map(str, steps(folder))) or 'none; set record.every_steps'}"
        )

    about = read_json(path / ABOUT) if (path / ABOUT).exists() else {}
    check_format(about, path / ABOUT)
    if about.get("step", step) != step:
        raise DamagedFile(f"{path} is the record of step {about['step']}, under another name.")
    if run and about.get(RUN, run) != run:
        raise DamagedFile(f"{path} is the record of another run.")

    batch, numbers = load_batch(path / BATCH), read_json(path / NUMBERS)
    if about.get("sha256", _hashes(path)) != _hashes(path):
        raise DamagedFile(f"{path} was altered after it was written.")
    return batch, {
        name: float(value) for name, value in numbers.items() if isinstance(value, int | float)
    }


def _hashes(folder: Path) -> dict[str, list[str]]:
    """Return the hashes of the files whose content a record vouches for."""
    names = (BATCH, NUMBERS)
    return dict(zip(names, hash_files([folder / name for name in names]), strict=True))
