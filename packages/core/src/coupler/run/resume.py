"""Find the checkpoint that a run goes on from, and check that it is the same run."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from coupler.config.effect import options_of
from coupler.config.options import TRACKER, Options
from coupler.config.schema import RunConfig
from coupler.errors import ConfigError
from coupler.interfaces import EngineConfig, RolloutConfig
from coupler.run import checkpoint
from coupler.run.checkpoint import WATCHED, Checkpoint
from coupler.run.effect import Change, changes
from coupler.run.manifest import BESIDE, RESOLVED
from coupler.run.run_folder import NOT_DEFAULT, read_starts
from coupler.run.user_files import FILES, warn_of_changed_files
from coupler.system.files import (
    DamagedFile,
    read_text,
    reading,
    set_aside,
    write_whole,
    writing,
)
from coupler.system.hashing import hash_start
from coupler.system.log import get_logger
from coupler.system.tree import flatten
from coupler.system.yaml_file import parse_yaml

log = get_logger(__name__)

AUTO, DISABLE = "auto", "disable"
MAX_CONFIG_BYTES = 4 << 20
KNOWN_TO_CORE = {
    "engine": EngineConfig,
    "rollout": RolloutConfig,
    "critic.engine": EngineConfig,
    "eval.rollout": RolloutConfig,
    "teacher.engine": EngineConfig,
    "reward_model.engine": EngineConfig,
    "judge.rollout": RolloutConfig,
}


def find(config: RunConfig, resolved: str, run: str = "") -> Checkpoint | None:
    """Return the checkpoint that ``checkpoint.resume`` means, or None to start anew.

    The log says what was found and what was skipped.
    A run that has checkpoints goes on from its own, wherever it started from. Where the
    configuration that it was made with is the same in effect, the hash of the
    configuration in its manifest is that of ``resolved``.

    Args:
        resolved: this run's configuration as YAML.
        run: the id of the run in ``run_dir``. Empty where it has none.

    Raises:
        ConfigError: there is none where one was named, all are damaged, or ``run_dir``
            holds another run.
        DamagedFile: a file that says which run ``run_dir`` holds cannot be read.
        CouplerError: a newer release wrote it, in a format that this one does not know.
    """
    run_dir, wanted = Path(config.run_dir), config.checkpoint.resume
    named = wanted not in (AUTO, DISABLE)

    if is_started(run_dir):
        _check_same(config, resolved)
        found = _newest(run_dir / "checkpoints", run)
        if found and named:
            log.info(
                f"checkpoint.resume={wanted} is left aside: run_dir has checkpoints of its own"
            )
        if found:
            log.info(f"going on from {found.folder}")
            _warn_of_changes(found, run_dir)
            warn_of_changed_files(found.manifest.get(FILES), resolved, found.step)
            return _of_this_configuration(found, resolved)
        log.info(f"no checkpoint yet, starting from {wanted if named else 'step 0'}")

    if not named:
        return None
    found = _named(Path(wanted))
    # The folder of its run, if the checkpoint still lies there.
    folder = found.folder.absolute().parent.parent
    same = is_started(folder) and not _changes(folder, config, resolved)
    return _of_this_configuration(found, resolved) if same else found


@cache
def config_hash(resolved: str) -> str:
    """Hash the options that must not change when a run goes on, as far as core knows.

    The options of plugins are compared with ``config.yaml``, not by this hash.
    """
    free = {
        key for key, option in Options(KNOWN_TO_CORE).table.items() if not option.affects_results
    }
    free.add(TRACKER)
    values = flatten(yaml.safe_load(resolved))
    text = yaml.safe_dump(
        {key: value for key, value in sorted(values.items()) if not _within(key, free)}
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _of_this_configuration(found: Checkpoint, resolved: str) -> Checkpoint:
    return replace(found, manifest={**found.manifest, "config": config_hash(resolved)})


def _check_same(config: RunConfig, resolved: str) -> None:
    if config.checkpoint.resume == DISABLE:
        raise ConfigError(
            f"run_dir={config.run_dir} holds a run already; nothing in it was touched.\n"
            "  try:  another run_dir, or checkpoint.resume=auto to go on with it"
        )

    changed = _changes(Path(config.run_dir), config, resolved)
    other_data = [change for change in changed if change.key.startswith("data.")]
    if config.checkpoint.reset_data:
        changed = [change for change in changed if change not in other_data]
    if not changed:
        return

    differences = "".join(f"  differs:  {line}\n" for line in changed[:8])
    ways = "\n".join(f"  {line}" for line in _ways_out(config.run_dir, changed, other_data))
    raise ConfigError(
        f"run_dir={config.run_dir} holds a run of another configuration; nothing in it "
        f"was touched.\n{differences}{ways}"
    )


def _ways_out(run_dir: str, changed: list[Change], other_data: list[Change]) -> list[str]:
    """Say what to do, with overrides that can be typed as they stand here."""
    ways = []
    if all(change.known for change in changed):
        ways.append(f"{' '.join(change.undo for change in changed)} to go on with it")
    if changed == other_data:
        ways.append(
            "checkpoint.reset_data=true to go on with it, from the beginning of the other data"
        )
    if checkpoint.folders(Path(run_dir) / "checkpoints"):
        ways.append(
            f"another run_dir with checkpoint.resume={run_dir} to start there from its last "
            "checkpoint"
        )

    ways.append("another run_dir to start anew")
    return [f"{'try:' if way is ways[0] else 'or: '}  {way}" for way in ways]


def _changes(folder: Path, config: RunConfig, resolved: str) -> list[Change]:
    """List what differs in effect between the run in ``folder`` and this one."""
    starts = read_starts(folder)
    gone = starts[-1].get(NOT_DEFAULT) if starts else None
    old = yaml.safe_load(read_config(folder))
    return changes(old, yaml.safe_load(resolved), options_of(config), gone)


def is_started(run_dir: Path) -> bool:
    """Tell whether ``run_dir`` holds a run that got to its first numbers."""
    files = ("config.yaml", "run.json")
    return any(os.path.lexists(run_dir / name) for name in files) or bool(
        checkpoint.folders(run_dir / "checkpoints")
    )


def read_config(run_dir: Path) -> str:
    """Return ``config.yaml`` of a run, or the copy of it that a checkpoint has.

    Raises:
        DamagedFile: neither can be read.
    """
    path = run_dir / "config.yaml"
    try:
        return _read_yaml(path)
    except DamagedFile as error:
        return _copy_of_config(run_dir, error)


def restore_config(run_dir: Path) -> None:
    """Replace a damaged ``config.yaml`` of a run by the copy that a checkpoint has.

    The damaged one is kept beside it.

    Raises:
        DamagedFile: no checkpoint has one.
    """
    path = run_dir / "config.yaml"
    try:
        if is_started(run_dir):
            _read_yaml(path)
    except DamagedFile as error:
        text = _copy_of_config(run_dir, error)
        with writing(f"the configuration {path}"):
            if os.path.lexists(path):
                set_aside(path)
            write_whole(path, text)


def _read_yaml(path: Path) -> str:
    text = read_text(path, MAX_CONFIG_BYTES)
    _check_config(text, path)
    return text


def _copy_of_config(run_dir: Path, damage: DamagedFile) -> str:
    for folder in checkpoint.folders(run_dir / "checkpoints"):
        manifest = checkpoint.whole(folder)
        if manifest and RESOLVED in manifest:
            with suppress(DamagedFile):
                _check_config(manifest[RESOLVED], folder)
                log.warning(f"{str(damage).removesuffix('.')}; the copy in {folder} is used")
                return manifest[RESOLVED]
    raise DamagedFile(f"{damage}\n  try:  putting it back, or another run_dir; nothing was touched")


def _check_config(text: str, path: Path) -> None:
    """Refuse what is no configuration of a run."""
    values = parse_yaml(text, path)
    with reading(path):
        if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
            raise ValueError("it is no mapping of options to values")
        engine = values.get("engine")
        if not isinstance(engine, dict) or not isinstance(engine.get("name"), str):
            raise ValueError("it names no engine, as every run's does")


def _warn_of_changes(found: Checkpoint, run_dir: Path) -> None:
    """Name files beside the checkpoint that are not as they were when it was made."""
    if extras := checkpoint.extras(found.folder, found.manifest):
        log.warning(f"{found.folder} has files that are not of it: {', '.join(extras[:8])}")

    for name, then in _watched(found.manifest.get(BESIDE)):
        path = run_dir / name
        try:
            same = hash_start(path, then["bytes"]) == then["sha256"] if path.is_file() else False
            why = "" if same else "is not what this run had written"
        except OSError as error:
            why = f"cannot be read ({error.strerror or error}), to compare it with what was written"
        if why:
            log.warning(f"{path} {why} by step {found.step}")


def _watched(entries: Any) -> list[tuple[str, Any]]:
    found = entries.items() if isinstance(entries, dict) else ()
    return [
        (name, entry)
        for name, entry in found
        if name in WATCHED and isinstance(entry, dict) and isinstance(entry.get("bytes"), int)
    ]


def _named(folder: Path) -> Checkpoint:
    """Return the checkpoint ``folder``, or the newest whole one of a run's folder."""
    if (folder / "checkpoints").is_dir():
        found = _newest(folder / "checkpoints", "")
        problem = "it has no step_* in checkpoints"
    else:
        problem = checkpoint.check(folder)
        found = None if problem else checkpoint.read(folder)

    if not found:
        raise ConfigError(
            f"checkpoint.resume={folder} is no whole checkpoint: {problem}.\n"
            "  try:  checkpoint.resume=auto, disable, or the folder of one, or of a run that "
            "has one"
        )
    log.info(f"starting from {found.folder}")
    return found


def _newest(folder: Path, run: str) -> Checkpoint | None:
    found, skipped = checkpoint.newest(folder, run)
    for line in skipped:
        log.info(f"checkpoint skipped: {line}")
    if skipped and not found:
        raise ConfigError(
            f"no checkpoint in {folder} is whole; nothing was touched.\n"
            "  try:  another run_dir to start anew, or move the damaged folders away"
        )
    return found


def _within(key: str, free: set[str]) -> bool:
    return any(key == option or key.startswith(f"{option}.") for option in free)
