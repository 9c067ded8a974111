"""Checkpoints: a folder that is complete or absent, with a manifest of what is in it.

``checkpoints/step_12/`` holds one folder per trained role, perhaps the models in
Hugging Face layout (``hf_model``, ``hf_model_critic``), ``state.json`` with where
the run stood, the scored groups that wait to be trained on, and ``MANIFEST.json``,
which is written last: a folder without it does not count.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import dropwhile
from math import isfinite, nan
from pathlib import Path, PurePosixPath
from typing import Any

from coupler.batch import Batch
from coupler.config.schema import HF_MODEL, RESUMED, CheckpointConfig
from coupler.errors import WaitTimeout
from coupler.interfaces import EVERYTHING, Part, Parts
from coupler.loop.engine_group import EngineGroup
from coupler.loop.state import State
from coupler.run.checkpoint_hook import call_hook, load_hook
from coupler.run.format import FORMAT, KEY, load_batch
from coupler.run.manifest import (
    BESIDE,
    MANIFEST,
    OF_THE_REST,
    RUN,
    STATE,
    check,
    extras,
    facts,
    folders,
    seal,
    whole,
)
from coupler.system.files import flush, read_json, reading, remove, set_aside, writing
from coupler.system.hashing import CHUNK_BYTES, hash_files, hash_start
from coupler.system.threads import in_daemon

GROUPS = "groups"
# Files of the run folder whose content so far a manifest holds the hash of.
WATCHED = ("metrics.jsonl",)
POLL_S = 0.05

__all__ = [
    "MANIFEST",
    "Checkpoint",
    "Checkpoints",
    "check",
    "extras",
    "folders",
    "newest",
    "read",
    "whole",
]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was found whole."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        return self.manifest["step"]

    @property
    def state(self) -> State:
        """Return where the run stood, from those files that the manifest lists.

        Raises:
            DamagedFile: a file does not hold that.
        """
        groups: dict[int, Batch] = {}
        for name in sorted(self.manifest["files"]):
            path = PurePosixPath(name)
            if str(path.parent) == GROUPS:
                with reading(self.folder / name):
                    groups[int(path.stem)] = load_batch(self.folder / name)
        return State(read_json(self.folder / STATE), groups)

    @property
    def contents(self) -> frozenset[str]:
        """Return what of :data:`~coupler.config.schema.RESUMED` it holds."""
        found = {"model", "optimizer"} if Part.OPTIMIZER in self.manifest["parts"] else {"model"}
        return frozenset(found | ({"extra"} if self.manifest.get("extra", True) else set()))

    async def restore(
        self, role: str, group: EngineGroup, contents: Collection[str] = RESUMED
    ) -> None:
        """Load what of ``role`` was saved and is wanted into all ranks of ``group``."""
        wanted = EVERYTHING if "optimizer" in contents else {Part.PARAMS}
        what = frozenset(Part(part) for part in self.manifest["parts"]) & wanted
        await group.load(self.folder / role, what)
        group.steps_done = self.manifest["roles"][role]["steps_done"]


class Checkpoints:
    """The checkpoints of one run.

    One save at a time is under way. Training goes on meanwhile if ``asynchronous`` is
    set.
    """

    def __init__(self, folder: Path, settings: CheckpointConfig, facts: Mapping[str, Any]) -> None:
        self.folder, self.settings, self.facts = folder, settings, facts
        self.hook = load_hook(settings.hook)
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
        """Write ``step_<step>``.

        The files go to a folder beside it, which is renamed when it is complete and on
        disk. The call returns when every engine has copied what it will write, or when
        all is written.

        Args:
            values: may hold the metric that ``checkpoint.keep_best`` ranks by.
            healthy: False if the gradient of the step was not finite. Such a checkpoint
                does not replace the last healthy one.

        Raises:
            CouplerError: this save or the one before it failed.
        """
        await self.settle()
        part = self.folder / f"step_{step}.part"
        with writing(f"the checkpoint {part}"):
            _start(part, roles, state if "extra" in self.settings.contents else None)

        contents = self.settings.contents
        moments = {Part.OPTIMIZER} if "optimizer" in contents else set[Part]()
        what = frozenset({Part.PARAMS} | moments)
        for role, group in roles.items():
            async with hold(role):
                await group.save(part / role, what)
                if HF_MODEL in contents:
                    await group.export(part / model_folder(role), Path(group.spec.model.path))

        manifest = self._manifest(
            step,
            roles,
            what,
            values,
            healthy,
        )
        finishing = self._finish(
            part,
            roles,
            manifest,
            sizes=_sizes(self.folder.parent),
        )
        self.under_way = asyncio.create_task(finishing)
        if not self.settings.asynchronous:
            await self.settle()

    async def __aenter__(self) -> Checkpoints:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let the save under way finish.

        Where the run has failed already, the failure of the run is the one to show.
        """
        with suppress(Exception) if kind else nullcontext():
            await self.settle()

    @property
    def ended(self) -> bool:
        """Tell whether a save ended, well or not, that was not settled yet."""
        return self.under_way is not None and self.under_way.done()

    async def settle(self) -> None:
        """Wait for the save under way, if there is one, and raise what made it fail."""
        if self.under_way:
            save, self.under_way = self.under_way, None
            await save

    def _manifest(
        self,
        step: int,
        roles: Mapping[str, EngineGroup],
        what: Parts,
        values: Mapping[str, float],
        healthy: bool,
    ) -> dict[str, Any]:
        best = values.get(self.settings.best_metric)

        return {
            KEY: FORMAT,
            "step": step,
            "parts": sorted(str(Part(part)) for part in what),
            "roles": {
                role: {
                    "ranks": len(group.ranks),
                    "shards": group.layout.num_shards,
                    "steps_done": group.steps_done,
                }
                for role, group in roles.items()
            },
            "extra": "extra" in self.settings.contents,
            "healthy": healthy,
            "best": None if best is None else [self.settings.best_metric, best],
            **self.facts,
        }

    async def _finish(
        self,
        part: Path,
        roles: Mapping[str, EngineGroup],
        manifest: dict[str, Any],
        sizes: Mapping[str, int],
    ) -> None:
        end = time.monotonic() + self.settings.deadline_s
        hashed: dict[str, Sequence[str]] = {}
        for role, group in roles.items():
            while None in (written := await group.saved()):
                if time.monotonic() > end:
                    raise self._late(part)
                await asyncio.sleep(POLL_S)

            hashed |= {
                f"{role}/{name}": hashes
                for files in filter(None, written)
                for name, hashes in files.items()
            }

        with writing(f"the checkpoint {part}"):
            completing = in_daemon(
                self._complete,
                part,
                manifest,
                hashed,
                sizes,
            )
            await asyncio.wait({completing}, timeout=max(0.0, end - time.monotonic()))
            if not completing.done():
                completing.cancel()
                raise self._late(part)
            await completing
        if self.hook:
            await call_hook(self.hook, part.with_suffix(""), max(1.0, end - time.monotonic()))

    def _late(self, part: Path) -> WaitTimeout:
        return WaitTimeout(
            f"{part} was not written after {self.settings.deadline_s:.0f} s.\n"
            "  look at:  the disk, checkpoint.deadline_s"
        )

    def _complete(
        self,
        part: Path,
        manifest: dict[str, Any],
        hashed: Mapping[str, Sequence[str]],
        sizes: Mapping[str, int],
    ) -> None:
        manifest[BESIDE] = {
            name: {"bytes": size, "sha256": hash_start(self.folder.parent / name, size)}
            for name, size in sizes.items()
        }
        _publish(part, manifest, hashed)
        _sweep(self.folder)
        self._prune(manifest["step"])

    def _prune(self, step: int) -> None:
        """Delete all checkpoints but the last, the best and the last healthy ones.

        The folders on disk are looked at, so that those of earlier starts count too.
        Those after ``step`` do not: the run did not go on from them, for they are
        damaged.
        """
        if not self.settings.keep_last:
            return

        manifests = {folder: whole(folder) for folder in folders(self.folder)}
        ours = self.facts.get(RUN)
        known = {
            folder: manifest
            for folder, manifest in manifests.items()
            if manifest and manifest.get(RUN, ours) == ours and manifest["step"] <= step
        }
        healthy = [folder for folder, manifest in known.items() if manifest["healthy"]]
        ranked = self._ranked(known)
        keep = {
            *list(known)[: self.settings.keep_last],
            *healthy[:1],
            *ranked[: self.settings.keep_best],
        }

        for folder in known.keys() - keep:
            # Without its manifest the folder does not count, whenever this ends.
            (folder / MANIFEST).unlink()
            shutil.rmtree(folder)

    def _ranked(self, known: Mapping[Path, Mapping[str, Any]]) -> list[Path]:
        """Return the checkpoints with a number of ``best_metric``, the best one first.

        Of equal ones that which comes first in ``known`` is the better one. NaN has no
        place in any order.
        """
        sign = 1 if self.settings.lower_is_better else -1
        found: dict[Path, float] = {}

        for folder, manifest in known.items():
            metric, value = manifest["best"] or ("", nan)
            if metric == self.settings.best_metric and isfinite(value):
                found[folder] = sign * value

        return sorted(
            found,
            key=found.__getitem__,
        )


def _sizes(run_dir: Path) -> dict[str, int]:
    """Return the sizes of the files that a manifest watches, where they are files."""
    paths = {name: run_dir / name for name in WATCHED}
    return {name: path.stat().st_size for name, path in paths.items() if path.is_file()}


def model_folder(role: str) -> str:
    """Name the Hugging Face folder of a role within a checkpoint."""
    return HF_MODEL if role == "policy" else f"{HF_MODEL}_{role}"


def _start(part: Path, roles: Iterable[str], state: State | None) -> None:
    """Make the folder, with where the run stands. None leaves that out."""
    remove(part)
    for role in roles:
        (part / role).mkdir(parents=True)
    state = state or State({}, {})
    (part / STATE).write_text(json.dumps(state.plain))
    if state.groups:
        (part / GROUPS).mkdir()
    for number, batch in state.groups.items():
        batch.save(part / GROUPS / f"{number}.npz")


def _sweep(folder: Path) -> None:
    """Delete what kills left behind.

    These are saves that were never renamed, and, before the newest whole checkpoint,
    folders that were half deleted.
    """
    unnamed = [
        path for path in folder.glob("step_*.part") if path.stem.removeprefix("step_").isdigit()
    ]
    after_whole = dropwhile(lambda path: not whole(path), folders(folder))
    for path in (*unnamed, *(path for path in after_whole if not (path / MANIFEST).exists())):
        shutil.rmtree(path, ignore_errors=True)


def read(folder: Path) -> Checkpoint:
    """Return a checkpoint that :func:`check` finds nothing wrong with."""
    return Checkpoint(folder, read_json(folder / MANIFEST))


def newest(folder: Path, run: str = "") -> tuple[Checkpoint | None, list[str]]:
    """Return the last whole checkpoint in ``folder``, and why later ones do not count.

    Every byte of the checkpoint is checked.

    Args:
        run: the id of the run that it must be of. Empty where that does not matter.
    """
    skipped: list[str] = []
    for path in folders(folder):
        problem = check(path, run)
        if not problem:
            return read(path), skipped
        skipped.append(f"{path.name}: {problem}")
    return None, skipped


def _publish(part: Path, manifest: dict[str, Any], hashed: Mapping[str, Sequence[str]]) -> None:
    """Write the manifest and rename the folder.

    Files whose hashes are not in ``hashed`` are read for them.
    """
    files = {
        str(path.relative_to(part)): path for path in sorted(part.rglob("*")) if path.is_file()
    }
    read = [name for name in files if name not in hashed]
    found = hash_files([files[name] for name in read])
    hashes = {**hashed, **dict(zip(read, found, strict=True))}

    manifest["chunk_bytes"] = CHUNK_BYTES
    manifest["files"] = {
        name: {"bytes": path.stat().st_size, "sha256": hashes[name]} for name, path in files.items()
    }
    manifest[OF_THE_REST] = seal(manifest)
    (part / MANIFEST).write_text(json.dumps(manifest, indent=2))

    for path in (*files.values(), part / MANIFEST, *_directories(part)):
        flush(path)
    folder = part.with_suffix("")
    if (there := facts(folder)) and there.get(RUN) != manifest.get(RUN):
        # It is whole, perhaps, and of another run.
        set_aside(folder)
    remove(folder)
    part.rename(folder)
    flush(folder.parent)


def _directories(folder: Path) -> Iterator[Path]:
    yield from (path for path in folder.rglob("*") if path.is_dir())
    yield folder
