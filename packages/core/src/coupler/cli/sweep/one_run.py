"""Make one run of a sweep, in a process of its own, and keep how it ended."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from coupler.cli.composing import quoted
from coupler.cli.sweep.space import label
from coupler.config.compose import compose, dump_yaml
from coupler.config.overrides import parse_overrides
from coupler.config.schema import Job
from coupler.errors import CouplerError
from coupler.plugins.manager import Plugins
from coupler.run.run_folder import DONE, ENDED, INTERRUPTED, read_starts
from coupler.system.files import DamagedFile, read_json, write_whole, writing
from coupler.system.log import VARIABLE, configure, get_logger
from coupler.system.plain import to_plain
from coupler.system.reaping import die_with_parent

log = get_logger(__name__)

# Folder in that of the sweep: one file for each run that has ended.
RECORDS = ".sweep"
MAX_NAME = 100
# Exit codes of a run that Ctrl-C ended.
INTERRUPTED_CODES = (130, -signal.SIGINT)
# Seconds in which a run ends after Ctrl-C.
END_S = 20.0


@dataclass(frozen=True, slots=True)
class Record:
    """The end of one run.

    Attributes:
        name: the name of its folder.
        values: the swept values by their keys.
        config: a hash of its configuration.
        code: the exit code of its process.
        reason: the first line of the error that ended it, as far as it wrote one.
    """

    name: str
    values: dict[str, Any]
    config: str
    code: int
    reason: str = ""

    @property
    def ended(self) -> str:
        """Say how the run ended."""
        if not self.code:
            return DONE
        if self.code in INTERRUPTED_CODES:
            return INTERRUPTED
        if self.reason:
            return f"failed: {self.reason}"
        with suppress(ValueError):
            return f"failed: killed by {signal.Signals(-self.code).name}"
        return f"failed: exit code {self.code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRun:
    """Starts one run. A launcher may call it in another process.

    Attributes:
        fixed: overrides of every run.
        config: the file of ``--config``.
        folder: the folder of the sweep.
        level: the level of messages, or an empty text for the default.
    """

    job: Job
    fixed: tuple[str, ...]
    config: str | None
    folder: Path
    level: str

    def __call__(self, swept: Sequence[str]) -> Record:
        """Run with the overrides ``swept``, unless that run is done already."""
        configure(self.level)
        name, options = name_of(swept), run_options(self.fixed, swept, self.folder)
        composed = compose(Plugins.load(), options, self.config, self.job)
        config = hashlib.sha256(dump_yaml(composed.config).encode()).hexdigest()

        previous = _read(self.folder / RECORDS / f"{name}.json")
        there = (self.folder / name / "config.yaml").is_file()
        if previous and there and (previous.config, previous.code) == (config, 0):
            log.info(f"{name} is done already")
            return previous

        log.info(f"{name} starts")
        values = {key: to_plain(value) for key, value in parse_overrides([*swept])}
        record = Record(name, values, config, INTERRUPTED_CODES[0])
        self._keep(record)
        starts = len(_starts(self.folder / name))
        code = self._run(options)

        begun = _starts(self.folder / name)[starts:]
        reason = str(begun[-1].get(ENDED, "")) if code and begun else ""
        record = replace(record, code=code, reason=reason)
        self._keep(record)
        if record.code in INTERRUPTED_CODES:
            raise KeyboardInterrupt
        if code:
            log.warning(f"{name} {record.ended}")
        return record

    def _run(self, options: Sequence[str]) -> int:
        """Run the command, and return its exit code."""
        file = [f"--config={self.config}"] if self.config else []
        command = [sys.executable, "-m", "coupler", str(self.job), *file, *options]
        environment = {**os.environ, VARIABLE: self.level} if self.level else None
        process = subprocess.Popen(
            command,
            env=environment,
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )

        try:
            return process.wait()
        except BaseException:
            _end(process)
            raise

    def _keep(self, record: Record) -> None:
        path = self.folder / RECORDS / f"{record.name}.json"
        with writing(f"how {record.name} ended"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(asdict(record), indent=2))


def name_of(swept: Sequence[str]) -> str:
    """Return a name for the folder of a run, made of its swept values.

    Example:
        ``name_of(["engine.lr=1e-06", "seed=1"])`` is ``"engine.lr-1e-06_seed-1"``.
    """
    pairs = [(label(key), _written(value)) for key, value in parse_overrides([*swept])]
    text = "_".join(f"{key}-{value}" for key, value in pairs)
    # The end of a path tells more than its beginning, and the hash tells the rest.
    short = "_".join(f"{key}-{value.rpartition('/')[2]}" for key, value in pairs)
    safe = re.sub(r"[^A-Za-z0-9._+-]", "-", short)
    if safe == text and len(text) <= MAX_NAME:
        return text
    return f"{safe[:MAX_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _written(value: Any) -> str:
    """Return a value without the quotes and escapes of the command line."""
    return value if isinstance(value, str) else json.dumps(to_plain(value))


def run_options(fixed: Sequence[str], swept: Sequence[str], folder: Path) -> list[str]:
    """Return the overrides of one run, whose folder is in that of the sweep."""
    return [*fixed, *swept, f"run_dir={quoted(folder / name_of(swept))}"]


def read_records(folder: Path) -> dict[str, Record]:
    """Return how the runs of a sweep have ended, by their names."""
    paths = sorted((folder / RECORDS).glob("*.json"), key=_age)
    return {path.stem: record for path in paths if (record := _read(path))}


def _read(path: Path) -> Record | None:
    """Return how a run has ended, or None of one that has to be made."""
    try:
        record = Record(**read_json(path, dict))
    except (DamagedFile, TypeError):
        return None
    is_one = type(record.code) is int and isinstance(record.values, dict)
    is_one = is_one and isinstance(record.reason, str)
    return replace(record, name=path.stem) if is_one else None


def _starts(run: Path) -> list[dict[str, Any]]:
    """Return what a run folder says of its starts, as far as it can be read."""
    with suppress(CouplerError):
        return read_starts(run)
    return []


def _age(path: Path) -> float:
    return path.stat().st_mtime


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a run that Ctrl-C ends, and end it where it does not."""
    try:
        for number in (0, signal.SIGINT, signal.SIGTERM):
            with suppress(subprocess.TimeoutExpired, ProcessLookupError):
                if number:
                    process.send_signal(number)
                process.wait(END_S)
                return
    finally:
        process.kill()
        process.wait()
