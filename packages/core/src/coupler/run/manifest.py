"""Check a checkpoint against the manifest that was written last into it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from coupler.errors import CouplerError
from coupler.interfaces import Part
from coupler.run.format import check_format, number_of
from coupler.system.archives import check_file
from coupler.system.files import DamagedFile, read_json
from coupler.system.hashing import hash_files

MANIFEST, STATE = "MANIFEST.json", "state.json"
# Key of the manifest: the hash of all its other keys, as JSON with sorted keys.
OF_THE_REST = "sha256"
# Key of manifests, records and run.json: the id of the run that wrote them.
RUN = "run"
# Key of the manifest: the configuration of the run, as config.yaml has it.
RESOLVED = "resolved"
# Key of the manifest: what the run had written of other files by then.
BESIDE = "beside"
TEXTS = ("data", "config", RUN, RESOLVED)
MIN_CHUNK_BYTES = 1 << 16


def folders(folder: Path) -> list[Path]:
    """Return the checkpoint folders, the last step first.

    Raises:
        DamagedFile: ``folder`` is no folder, or cannot be read.
    """
    try:
        found = [path for path in folder.iterdir() if number_of(path) is not None]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DamagedFile(f"{folder} cannot be read: {error.strerror or error}.") from None
    return sorted(found, key=lambda path: number_of(path) or 0, reverse=True)


def facts(folder: Path) -> dict[str, Any]:
    """Return the manifest, altered or not, or nothing where none can be read."""
    try:
        return read_json(folder / MANIFEST)
    except DamagedFile:
        return {}


def whole(folder: Path) -> dict[str, Any] | None:
    """Return the manifest, or None if it is missing or was altered."""
    manifest = facts(folder)
    if not manifest or manifest.get(OF_THE_REST) != seal(manifest):
        return None
    return None if _misfit(manifest) else manifest


def seal(manifest: Mapping[str, Any]) -> str:
    """Return the hash of a manifest without its own hash."""
    rest = {key: value for key, value in manifest.items() if key != OF_THE_REST}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def check(folder: Path, run: str = "") -> str:
    """Return what is wrong with a checkpoint, or an empty text.

    A disk that refuses to read a file counts as damage.

    Args:
        run: the id of the run that it must be of. Empty where that does not matter.

    Raises:
        CouplerError: a newer release wrote it, in a format that this one does not know.
    """
    try:
        manifest = read_json(folder / MANIFEST)
    except DamagedFile as error:
        why = str(error).removeprefix(f"{folder / MANIFEST} ").removesuffix(".")
        if why == "is missing":
            return f"it has no {MANIFEST}, so it was not written to its end"
        if why.startswith("is damaged"):
            return f"{MANIFEST} was altered after it was written"
        return f"{MANIFEST} {why}"

    check_format(manifest, folder / MANIFEST)
    if manifest.get(OF_THE_REST) != seal(manifest):
        return f"{MANIFEST} was altered after it was written"
    if misfit := _misfit(manifest):
        return f"{MANIFEST} is none of Coupler's: {misfit}"
    if number_of(folder) not in (manifest["step"], None):
        return f"it is that of step {manifest['step']}, under another name"
    if run and manifest.get(RUN, run) != run:
        return "it is of another run"

    try:
        return _check_files(folder, manifest)
    except OSError as error:
        return f"{error.filename or folder} cannot be read: {error.strerror or error}"


def extras(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Return the files in a checkpoint that its manifest does not list."""
    found = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()]
    return sorted({*found} - {*manifest["files"], MANIFEST})


def _check_files(folder: Path, manifest: Mapping[str, Any]) -> str:
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

    # Only a manifest that somebody forged gets here with files that are not ours.
    for name in manifest["files"]:
        try:
            check_file(folder / name)
        except CouplerError as error:
            return str(error)
    return ""


def _misfit(manifest: Mapping[str, Any]) -> str:
    """Return the first key of a manifest that is not of its type, or an empty text."""
    expected = {
        "step": _is_count,
        "parts": lambda value: isinstance(value, list) and {*value} <= {str(p) for p in Part},
        "roles": lambda value: isinstance(value, dict) and all(map(_is_role, value.items())),
        "healthy": lambda value: isinstance(value, bool),
        "best": lambda value: value is None or _is_best(value),
        **{key: lambda value: isinstance(value, str) for key in TEXTS if key in manifest},
        "chunk_bytes": lambda value: _is_count(value) and value >= MIN_CHUNK_BYTES,
        "files": lambda value: STATE in value and all(map(_is_entry, value.items())),
    }
    for key, fits in expected.items():
        try:
            if key not in manifest or not fits(manifest[key]):
                return key
        except (TypeError, AttributeError):
            return key
    return ""


def _is_role(item: tuple[str, Any]) -> bool:
    name, role = item
    return _is_inside(name) and isinstance(role, dict) and _is_count(role.get("steps_done"))


def _is_best(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], int | float)
    )


def _is_entry(item: tuple[str, Any]) -> bool:
    name, entry = item
    return (
        _is_inside(name)
        and isinstance(entry, dict)
        and _is_count(entry.get("bytes"))
        and isinstance(entry.get("sha256"), list)
    )


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
