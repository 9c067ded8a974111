"""Checkpoints: a folder that is complete or absent, with a manifest of what is in it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from importlib.metadata import version
from pathlib import Path

from coupler.interfaces import Part, Parts
from coupler.workers import WorkerGroup

MANIFEST = "MANIFEST.json"


async def save(policy: WorkerGroup, folder: Path, step: int, what: Parts, deadline_s: float) -> None:
    """Write ``folder`` with every rank's part and a manifest of files, sizes and hashes.

    Everything goes to a folder beside it, which is renamed when it is complete and on disk.
    """
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    await policy.all("save", part, what, deadline_s)
    files = sorted(p for p in part.rglob("*") if p.is_file())
    manifest = {
        "step": step,
        "world_size": len(policy.ranks),
        "parts": sorted(str(Part(p)) for p in what),
        "coupler": version("coupler-core"),
        "files": {str(p.relative_to(part)): {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files},
    }
    (part / MANIFEST).write_text(json.dumps(manifest, indent=2))
    for path in [*files, part / MANIFEST, part]:
        _fsync(path)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    _fsync(folder.parent)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
