"""List entry points of installed distributions, whatever state their metadata is in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, distributions
from importlib.resources import files
from pathlib import Path
from typing import Any

from coupler.errors import CouplerError
from coupler.system.contained import shortened

MAX_TEXT = 1 << 16


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry is one entry point.

    Attributes:
        value: ``"package.module"``, as it is written.
        place: the folder in which its distribution is installed.
        files: the records of the distribution.
        problem: why it cannot be used. Then it has no value.
    """

    name: str
    value: str
    distribution: str
    version: str
    place: str
    files: tuple[str, ...] = ()
    problem: str = ""


def entries(group: str) -> Iterator[Entry]:
    """Yield the entry points of a group, in the order of ``sys.path``."""
    for dist in distributions():
        try:
            found = list(_entries(dist, group))
        # Metadata is written by anybody.
        except Exception as error:
            if _names(dist, group):
                folder = _folder(dist)
                name, _, number = folder.rpartition(".")[0].partition("-")
                yield Entry(
                    folder,
                    "",
                    name,
                    number,
                    "",
                    problem=_sentence(error),
                )
        else:
            yield from found


def _entries(dist: Distribution, group: str) -> Iterator[Entry]:
    # Most distributions have no such group, and are done with here.
    text = dist.read_text("entry_points.txt")
    if not text or f"[{group}]" not in text.replace(" ", ""):
        return

    name, version = dist.metadata["Name"], dist.metadata["Version"]
    if not name:
        raise ValueError("its METADATA has no Name")
    path: Any = getattr(dist, "_path", None)
    records = ("METADATA", "RECORD", "entry_points.txt")
    paths = (
        tuple(str(path / record) for record in records)
        if isinstance(
            path,
            Path,
        )
        else ()
    )
    for entry in dist.entry_points:
        if entry.group == group:
            yield Entry(
                shortened(entry.name),
                entry.value,
                shortened(name),
                shortened(version or ""),
                str(dist.locate_file("")),
                paths,
            )


def _names(dist: Distribution, group: str) -> bool:
    """Tell whether a file that cannot be read has this group, in any encoding."""
    path = getattr(dist, "_path", None)
    try:
        raw = (
            (path / "entry_points.txt").read_bytes()
            if isinstance(
                path,
                Path,
            )
            else b""
        )
    except OSError:
        return False
    return f"[{group}]".encode() in raw.replace(b"\0", b"").replace(
        b" ",
        b"",
    )


def _folder(dist: Distribution) -> str:
    path = getattr(dist, "_path", None)
    return (
        shortened(path.name)
        if isinstance(
            path,
            Path,
        )
        else "a distribution"
    )


def _sentence(error: Exception) -> str:
    return f"its metadata cannot be read: {shortened(str(error)) or type(error).__name__}"


def open_entry(value: str) -> Any:
    """Import what the value of an entry point names.

    Raises:
        CouplerError: it names no module.
    """
    match = EntryPoint.pattern.match(value)
    if not match or not match["module"].isascii():
        raise CouplerError(f"its entry point {value!r:.100} names no module")
    return (
        EntryPoint(
            "",
            value,
            "",
        ).load()
        if match["attr"]
        else import_module(match["module"])
    )


def texts_in(
    package: str, folders: Iterable[str], suffix: str
) -> Iterator[tuple[str, str, str, str]]:
    """Yield folder, name, text and path of the files of a package with one suffix.

    A folder itself has no name. Its path says that files may come to it.
    """
    for folder in folders:
        found = files(package).joinpath(folder)
        yield folder, "", "", str(found)
        for file in (
            sorted(
                found.iterdir(),
                key=str,
            )
            if found.is_dir()
            else ()
        ):
            if file.name.endswith(suffix):
                text = file.read_bytes()[: MAX_TEXT + 1].decode(errors="replace")
                if len(text) > MAX_TEXT:
                    raise CouplerError(f"{file} has more than {MAX_TEXT} characters")
                yield folder, file.name.removesuffix(suffix), text, str(file)
