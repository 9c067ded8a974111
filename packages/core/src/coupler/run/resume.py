"""Which checkpoint a run goes on from, and whether it is the same run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from coupler.config.effect import options_of
from coupler.config.options import Options
from coupler.config.schema import RunConfig
from coupler.config.tree import flatten
from coupler.errors import ConfigError
from coupler.interfaces import EngineConfig, RolloutConfig
from coupler.run import checkpoint
from coupler.run.checkpoint import Checkpoint
from coupler.run.effect import Change, changes
from coupler.run.run_folder import NOT_DEFAULT, read_starts
from coupler.system.log import get_logger

log = get_logger(__name__)

AUTO, DISABLE = "auto", "disable"
KNOWN_TO_CORE = {"engine": EngineConfig, "rollout": RolloutConfig, "critic.engine": EngineConfig}


def find(config: RunConfig, resolved: str) -> Checkpoint | None:
    """The checkpoint that ``checkpoint.resume`` means; None to start anew. Says what it found and what it skipped.

    A run that has checkpoints goes on from its own, wherever it started from. Where the configuration that it was made
    with is the same in effect, the hash of the configuration in its manifest is that of ``resolved``.

    Args:
        resolved: this run's configuration as YAML.

    Raises:
        ConfigError: there is none where one was named, all are damaged, or ``run_dir`` holds another run.
        CouplerError: a newer release wrote it, in a format that this one does not know.
    """
    run_dir, wanted = Path(config.run_dir), config.checkpoint.resume
    named = wanted not in (AUTO, DISABLE)
    if (run_dir / "config.yaml").exists():
        _check_same(config, resolved)
        found = _newest(run_dir / "checkpoints")
        if found and named:
            log.info(f"checkpoint.resume={wanted} is left aside: run_dir has checkpoints of its own")
        if found:
            log.info(f"going on from {found.folder}")
            return _of_this_configuration(found, resolved)
        log.info(f"no checkpoint yet, starting from {wanted if named else 'step 0'}")
    if not named:
        return None
    found = _named(Path(wanted))
    folder = found.folder.absolute().parent.parent  # of its run, if it still lies there
    same = (folder / "config.yaml").exists() and not _changes(folder, config, resolved)
    return _of_this_configuration(found, resolved) if same else found


def config_hash(resolved: str) -> str:
    """Hash what must not change when a run goes on, as far as core knows: a checkpoint's folder tells it whole."""
    free = {key for key, option in Options(KNOWN_TO_CORE).table.items() if not option.affects_results}
    values = flatten(yaml.safe_load(resolved))
    text = yaml.safe_dump({key: value for key, value in sorted(values.items()) if not _within(key, free)})
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
    if changed:
        raise ConfigError(
            f"run_dir={config.run_dir} holds a run of another configuration; nothing in it was touched.\n"
            + "".join(f"  differs:  {line}\n" for line in changed[:8])
            + "\n".join(f"  {line}" for line in _ways_out(config.run_dir, changed, other_data))
        )


def _ways_out(run_dir: str, changed: list[Change], other_data: list[Change]) -> list[str]:
    """Say what to do, with overrides that can be typed as they stand here."""
    ways = []
    if all(change.known for change in changed):
        ways.append(f"{' '.join(change.undo for change in changed)} to go on with it")
    if changed == other_data:
        ways.append("checkpoint.reset_data=true to go on with it, from the beginning of the other data")
    if checkpoint.folders(Path(run_dir) / "checkpoints"):
        ways.append(f"another run_dir with checkpoint.resume={run_dir} to start there from its last checkpoint")
    ways.append("another run_dir to start anew")
    return [f"{'try:' if way is ways[0] else 'or: '}  {way}" for way in ways]


def _changes(folder: Path, config: RunConfig, resolved: str) -> list[Change]:
    """List what differs in effect between the run in ``folder`` and this one."""
    starts = read_starts(folder)
    gone = starts[-1].get(NOT_DEFAULT) if starts else None
    old: Mapping[str, Any] = yaml.safe_load((folder / "config.yaml").read_text())
    return changes(old, yaml.safe_load(resolved), options_of(config), gone)


def _named(folder: Path) -> Checkpoint:
    """The checkpoint ``folder``, or the newest whole one of a run's folder."""
    if (folder / "checkpoints").is_dir():
        found = _newest(folder / "checkpoints")
        problem = "it has no step_* in checkpoints"
    else:
        problem = checkpoint.check(folder)
        found = None if problem else checkpoint.read(folder)
    if not found:
        raise ConfigError(
            f"checkpoint.resume={folder} is no whole checkpoint: {problem}.\n"
            "  try:  checkpoint.resume=auto, disable, or the folder of one, or of a run that has one"
        )
    log.info(f"starting from {found.folder}")
    return found


def _newest(folder: Path) -> Checkpoint | None:
    found, skipped = checkpoint.newest(folder)
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
