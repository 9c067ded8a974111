"""Which checkpoint a run goes on from, and whether it is the same run."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import yaml

from coupler.config.schema import RunConfig
from coupler.config.tree import flatten
from coupler.errors import ConfigError
from coupler.run import checkpoint
from coupler.run.checkpoint import Checkpoint
from coupler.system.log import get_logger

log = get_logger(__name__)

AUTO, DISABLE = "auto", "disable"
FREE = (  # what may change when a run goes on: how long it is, what is written, where it runs, when it gives up
    "run_dir", "steps", "trackers", "strict", "checkpoint", "record", "eval", "max_skipped_steps",
    "executor", "ray", "waits", "engine.ranks", "engine.python", "critic.engine.ranks", "critic.engine.python",
    "rollout.replicas", "rollout.python", "max_rejected_factor", "reward.num_workers", "reward.timeout_s",
    "reward.max_invalid_fraction", "sync.deadline_s",
)  # fmt: skip


def find(config: RunConfig, resolved: str) -> Checkpoint | None:
    """The checkpoint that ``checkpoint.resume`` means; None to start anew. Says what it found and what it skipped.

    A run that has checkpoints goes on from its own, wherever it started from.

    Args:
        resolved: this run's configuration as YAML.

    Raises:
        ConfigError: there is none where one was named, all are damaged, or ``run_dir`` holds another run.
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
            return found
        log.info(f"no checkpoint yet, starting from {wanted if named else 'step 0'}")
    return _named(Path(wanted)) if named else None


def config_hash(resolved: str) -> str:
    """Hash what must not change when a run goes on."""
    text = yaml.safe_dump({k: v for k, v in sorted(flatten(yaml.safe_load(resolved)).items()) if not _free(k)})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_same(config: RunConfig, resolved: str) -> None:
    if config.checkpoint.resume == DISABLE:
        raise ConfigError(
            f"run_dir={config.run_dir} holds a run already; nothing in it was touched.\n"
            "  try:  another run_dir, or checkpoint.resume=auto to go on with it"
        )
    changed = _changes(yaml.safe_load((Path(config.run_dir) / "config.yaml").read_text()), yaml.safe_load(resolved))
    if changed:
        raise ConfigError(
            f"run_dir={config.run_dir} holds a run of another configuration; nothing in it was touched.\n"
            + "".join(f"  differs:  {line}\n" for line in changed[:8])
            + "  try:  another run_dir; checkpoint.resume=FOLDER starts there from a checkpoint of this one"
        )


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


def _changes(old: Any, new: Any) -> list[str]:
    before, now = flatten(old), flatten(new)
    keys = sorted(key for key in before.keys() | now.keys() if not _free(key))
    return [f"{key} was {before.get(key)}, is {now.get(key)}" for key in keys if before.get(key) != now.get(key)]


def _free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE)
