"""Checkpoints: a folder that is complete or absent, with a manifest of what is in it.

``checkpoints/step_12/`` holds one folder per trained role, ``state.json`` with where the run stood, the scored groups
that wait to be trained on, and ``MANIFEST.json``, which is written last: a folder without it does not count.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

from coupler.batch import Batch
from coupler.config.schema import CheckpointConfig
from coupler.errors import WaitTimeout
from coupler.interfaces import EVERYTHING, Part, Parts
from coupler.loop.engine_group import EngineGroup
from coupler.loop.state import State
from coupler.run.format import FORMAT, KEY, check_format
from coupler.system.files import writing
from coupler.system.hashing import CHUNK_BYTES, hash_files
from coupler.system.threads import in_daemon

MANIFEST, STATE, GROUPS = "MANIFEST.json", "state.json", "groups"
OF_THE_REST = "sha256"  # the manifest's key for the hash of all its others, as JSON with sorted keys
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that was found whole."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        return self.manifest["step"]

    @property
    def state(self) -> State:
        groups = {int(path.stem): Batch.load(path) for path in sorted((self.folder / GROUPS).glob("*.npz"))}
        return State(json.loads((self.folder / STATE).read_text()), groups)

    async def restore(self, role: str, group: EngineGroup) -> None:
        """Load what was saved of ``role`` into every rank of ``group``."""
        what = frozenset(Part(part) for part in self.manifest["parts"])
        await group.load(self.folder / role, what)
        group.steps_done = self.manifest["roles"][role]["steps_done"]


class Checkpoints:
    """Those of one run. One save at a time is under way; training goes on meanwhile if ``asynchronous`` is set."""

    def __init__(self, folder: Path, settings: CheckpointConfig, facts: Mapping[str, Any]) -> None:
        self.folder, self.settings, self.facts = folder, settings, facts
        self.under_way: asyncio.Task[None] | None = None

    async def save(
        self,
        step: int,
        roles: Mapping[str, EngineGroup],
        state: State,
        *,
        hold: Callable[[str], AbstractAsyncContextManager[Any]],
        values: Mapping[str, float],
        healthy: bool,
    ) -> None:
        """Write ``step_<step>``: to a folder beside it, which is renamed when it is complete and on disk.

        Returns when every engine has copied what it will write, or when all is written. ``values`` may hold the metric
        that ``checkpoint.keep_best`` ranks by; an unhealthy step, whose gradient was not finite, is no replacement for
        the last healthy one.

        Raises:
            CouplerError: this save or the one before it failed.
        """
        await self.settle()
        part = self.folder / f"step_{step}.part"
        with writing(f"the checkpoint {part}"):
            _start(part, roles, state)
        what = EVERYTHING - {Part.GRADS} if self.settings.optimizer else frozenset({Part.PARAMS})
        for role, group in roles.items():
            async with hold(role):
                await group.save(part / role, what)
        manifest = self._manifest(step, roles, what, values, healthy)
        self.under_way = asyncio.create_task(self._finish(part, roles, manifest))
        if not self.settings.asynchronous:
            await self.settle()

    async def __aenter__(self) -> Checkpoints:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let the save under way finish; where the run has failed already, its failure is the one to show."""
        with suppress(Exception) if kind else nullcontext():
            await self.settle()

    @property
    def ended(self) -> bool:
        """Whether a save ended, well or not, that :meth:`settle` has not looked at."""
        return self.under_way is not None and self.under_way.done()

    async def settle(self) -> None:
        """Wait for the save under way, if there is one; raise what made it fail."""
        if self.under_way:
            save, self.under_way = self.under_way, None
            await save

    def _manifest(
        self, step: int, roles: Mapping[str, EngineGroup], what: Parts, values: Mapping[str, float], healthy: bool
    ) -> dict[str, Any]:
        best = values.get(self.settings.best_metric)
        return {
            KEY: FORMAT,
            "step": step,
            "parts": sorted(str(Part(part)) for part in what),
            "roles": {
                role: {"ranks": len(group.ranks), "shards": group.layout.num_shards, "steps_done": group.steps_done}
                for role, group in roles.items()
            },
            "healthy": healthy,
            "best": None if best is None else [self.settings.best_metric, best],
            **self.facts,
        }

    async def _finish(self, part: Path, roles: Mapping[str, EngineGroup], manifest: dict[str, Any]) -> None:
        end = time.monotonic() + self.settings.deadline_s
        hashed: dict[str, Sequence[str]] = {}
        for role, group in roles.items():
            while None in (written := await group.saved()):
                if time.monotonic() > end:
                    raise self._late(part)
                await asyncio.sleep(POLL_S)
            hashed |= {f"{role}/{name}": hashes for files in filter(None, written) for name, hashes in files.items()}
        with writing(f"the checkpoint {part}"):
            completing = in_daemon(self._complete, part, manifest, hashed)
            await asyncio.wait({completing}, timeout=max(0.0, end - time.monotonic()))
            if not completing.done():
                completing.cancel()
                raise self._late(part)
            await completing

    def _late(self, part: Path) -> WaitTimeout:
        return WaitTimeout(
            f"{part} was not written after {self.settings.deadline_s:.0f} s.\n"
            "  look at:  the disk, checkpoint.deadline_s"
        )

    def _complete(self, part: Path, manifest: dict[str, Any], hashed: Mapping[str, Sequence[str]]) -> None:
        _publish(part, manifest, hashed)
        _sweep(self.folder)
        self._prune()

    def _prune(self) -> None:
        """Delete all but the last, the best and the last healthy ones. The disk says which there are, not memory."""
        if not self.settings.keep_last:
            return
        manifests = {folder: _manifest(folder) for folder in folders(self.folder)}
        known = {folder: manifest for folder, manifest in manifests.items() if manifest}
        keep = set(list(known)[: self.settings.keep_last])
        keep |= set([folder for folder, manifest in known.items() if manifest["healthy"]][:1])
        ranked = [f for f, m in known.items() if m["best"] and m["best"][0] == self.settings.best_metric]
        ranked.sort(key=lambda folder: known[folder]["best"][1], reverse=True)
        keep |= set(ranked[: self.settings.keep_best])
        for folder in known.keys() - keep:
            (folder / MANIFEST).unlink()  # from here on it does not count, whenever this ends
            shutil.rmtree(folder)


def _start(part: Path, roles: Iterable[str], state: State) -> None:
    shutil.rmtree(part, ignore_errors=True)
    for role in roles:
        (part / role).mkdir(parents=True)
    (part / STATE).write_text(json.dumps(state.plain))
    if state.groups:
        (part / GROUPS).mkdir()
    for number, batch in state.groups.items():
        batch.save(part / GROUPS / f"{number}.npz")


def _sweep(folder: Path) -> None:
    """Delete what kills left: saves never renamed, and before the newest whole checkpoint those half deleted."""
    unnamed = [path for path in folder.glob("step_*.part") if path.stem.removeprefix("step_").isdigit()]
    after_whole = dropwhile(lambda path: not _manifest(path), folders(folder))
    for path in (*unnamed, *(path for path in after_whole if not (path / MANIFEST).exists())):
        shutil.rmtree(path, ignore_errors=True)


def read(folder: Path) -> Checkpoint:
    """A checkpoint that :func:`check` finds nothing wrong with."""
    return Checkpoint(folder, json.loads((folder / MANIFEST).read_text()))


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The last whole checkpoint in ``folder``, every byte of it checked, and why the later ones do not count."""
    skipped: list[str] = []
    for path in folders(folder):
        problem = check(path)
        if not problem:
            return read(path), skipped
        skipped.append(f"{path.name}: {problem}")
    return None, skipped


def check(folder: Path) -> str:
    """What is wrong with a checkpoint; empty if nothing is.

    Raises:
        CouplerError: a newer release wrote it, in a format that this one does not know.
    """
    check_format(_facts(folder), folder / MANIFEST)
    manifest = _manifest(folder)
    if manifest is None:
        if (folder / MANIFEST).exists():
            return f"{MANIFEST} was altered after it was written"
        return f"it has no {MANIFEST}, so it was not written to its end"
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
    found = hash_files([folder / name for name in manifest["files"]], manifest["chunk_bytes"])
    for (name, expected), hashes in zip(manifest["files"].items(), found, strict=True):
        if hashes != expected["sha256"]:
            return f"{name} was altered after it was written"
    return ""


def folders(folder: Path) -> list[Path]:
    """Checkpoint folders, the last step first."""
    steps = {path: path.name.removeprefix("step_") for path in folder.glob("step_*")}
    return sorted((p for p, step in steps.items() if step.isdigit()), key=lambda p: int(steps[p]), reverse=True)


def _manifest(folder: Path) -> dict[str, Any] | None:
    """What it says, if that is what was written."""
    manifest = _facts(folder)
    return manifest if manifest and manifest.get(OF_THE_REST) == _hash(manifest) else None


def _facts(folder: Path) -> dict[str, Any]:
    """What the manifest says, altered or not; nothing where none can be read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _hash(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != OF_THE_REST}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _publish(part: Path, manifest: dict[str, Any], hashed: Mapping[str, Sequence[str]]) -> None:
    """Write the manifest and rename; files whose hashes nobody brings are read for them."""
    files = {str(path.relative_to(part)): path for path in sorted(part.rglob("*")) if path.is_file()}
    read = [name for name in files if name not in hashed]
    hashes = {**hashed, **dict(zip(read, hash_files([files[name] for name in read]), strict=True))}
    manifest["chunk_bytes"] = CHUNK_BYTES
    manifest["files"] = {name: {"bytes": path.stat().st_size, "sha256": hashes[name]} for name, path in files.items()}
    manifest[OF_THE_REST] = _hash(manifest)
    (part / MANIFEST).write_text(json.dumps(manifest, indent=2))
    for path in (*files.values(), part / MANIFEST, *_directories(part)):
        _fsync(path)
    folder = part.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    _fsync(folder.parent)


def _directories(folder: Path) -> Iterator[Path]:
    yield from (path for path in folder.rglob("*") if path.is_dir())
    yield folder


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
