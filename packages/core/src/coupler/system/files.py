"""Read and write files so that damage and disk errors end in one clear sentence."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from coupler.errors import CouplerError

# Text that a run keeps is far below this size.
MAX_TEXT_BYTES = 256 << 20
# Errors of disks, folders and permissions, also where they do not name a file.
DISK_ERRORS = frozenset(
    getattr(errno, name)
    for name in (
        "ENOSPC",
        "EDQUOT",
        "EIO",
        "EROFS",
        "ESTALE",
        "EFBIG",
        "ENXIO",
        "ENODEV",
        "ENOTEMPTY",
        "ENAMETOOLONG",
    )
    if hasattr(errno, name)
)


class DamagedFile(CouplerError):
    """A file cannot be read, or does not hold what it should."""


def write_whole(path: Path, text: str) -> None:
    """Write beside ``path`` and rename, so that a kill leaves what was there."""
    part = path.with_name(f"{path.name}.part")
    if _kind(part, follow=True) not in ("", "device") and _kind(part) != "file":
        set_aside(part)
    if _kind(path) == "folder":
        set_aside(path)

    part.write_text(text, encoding="utf-8")
    flush(part)
    part.replace(path)
    flush(path.parent)


def make_own(path: Path) -> None:
    """Copy a file that has further names, so that what is written to it shows in none
    of these.
    """
    if _kind(path) == "file" and path.stat().st_nlink > 1:
        part = path.with_name(f"{path.name}.part")
        remove(part)
        shutil.copyfile(path, part)
        part.replace(path)


def flush(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_aside(path: Path) -> Path:
    """Rename ``path`` to a name that is free and that nothing reads, and return it."""
    number = 0
    while os.path.lexists(aside := path.with_name(f"{path.name}.aside{number or ''}")):
        number += 1
    path.rename(aside)
    return aside


def remove(path: Path) -> None:
    """Delete a folder, a file or a link. What is not there is deleted already."""
    if _kind(path) == "folder":
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Refuse to open a pipe or a socket for writing, which would wait for a reader.

    Raises:
        OSError: there is one at ``path``.
    """
    if (kind := _kind(path, follow=True)) in ("pipe", "socket"):
        raise OSError(errno.EINVAL, f"it is a {kind}", str(path))


def read_bytes(path: Path, limit: int = MAX_TEXT_BYTES) -> bytes:
    """Read a regular file of at most ``limit`` bytes. Nothing else is opened.

    Raises:
        DamagedFile: there is none, it is none, it is larger, or the disk refuses it.
    """
    try:
        kind = _kind(path, follow=True)
        if kind != "file":
            raise DamagedFile(f"{path} {f'is a {kind}, not a file' if kind else 'is missing'}.")
        # The file may have been replaced by a pipe since.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            found = file.read(limit + 1)
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error.strerror or error}.") from None

    if len(found) > limit:
        raise DamagedFile(f"{path} has more than {limit} bytes, which no run writes.")
    return found


def read_text(path: Path, limit: int = MAX_TEXT_BYTES) -> str:
    """Read a regular file as UTF-8.

    Raises:
        DamagedFile: it cannot be read, or is no such text.
    """
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError:
        raise DamagedFile(f"{path} is damaged: it is no UTF-8 text.") from None


def read_json(path: Path, kind: type[Any] = dict) -> Any:
    """Read a regular file as JSON whose outermost value is of type ``kind``.

    Raises:
        DamagedFile: it cannot be read, or is no such JSON.
    """
    text = read_text(path)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError, MemoryError) as error:
        why = "it is empty" if not text.strip() else f"it is no JSON ({_short(error)})"
        raise DamagedFile(f"{path} is damaged: {why}.") from None
    if not isinstance(found, kind):
        what = {dict: "object", list: "list"}.get(kind, kind.__name__)
        raise DamagedFile(f"{path} is damaged: it holds no JSON {what}.")
    return found


def json_line(line: bytes | str) -> dict[str, Any] | None:
    """Return a line of JSON as a mapping, or None where it is damaged."""
    try:
        found = json.loads(line if isinstance(line, str) else line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Name ``path`` where its content is not what the block takes it for.

    Raises:
        DamagedFile: the block failed over the content, or the disk.
    """
    try:
        yield
    except CouplerError:
        raise
    except Exception as error:
        # Readers of hostile files fail with nearly every type there is.
        raise DamagedFile(f"{path} is damaged: {type(error).__name__}: {_short(error)}.") from error


@contextmanager
def writing(what: str, *also: type[Exception]) -> Iterator[None]:
    """Name what the block writes where the disk is full, or refuses otherwise.

    Args:
        what: the thing that is written, with its path.
        also: exceptions of a library that mean the same as an ``OSError``.

    Raises:
        CouplerError: it cannot be written.
    """
    try:
        yield
    except (OSError, *also) as error:
        raise CouplerError(_refused(f"{what} cannot be written: {error}")) from error


@contextmanager
def disk_errors_named(folder: Path) -> Iterator[None]:
    """Turn an error of the disk that nothing else named into a sentence.

    This is the net under a whole job. An ``OSError`` counts if it names a file below
    ``folder``, or if no file is named and only a disk fails like that.

    Args:
        folder: the folder that the job writes to.

    Raises:
        CouplerError: the disk failed.
    """
    try:
        yield
    except OSError as error:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        inside = any(_is_below(name, folder) for name in names)
        if not inside and error.errno not in DISK_ERRORS:
            raise
        where = names[0] if names else str(folder)
        raise CouplerError(
            _refused(f"{where} cannot be used: {error.strerror or error}")
        ) from error


def _is_below(name: str, folder: Path) -> bool:
    with suppress(OSError, ValueError):
        return Path(os.path.abspath(name)).is_relative_to(os.path.abspath(folder))
    return False


def _refused(text: str) -> str:
    return (
        f"{text}.\n"
        "  try:  room and permission to write there, then the same command: a run goes on "
        "from its last checkpoint"
    )


def _kind(path: Path, *, follow: bool = False) -> str:
    """Return what there is at ``path``, or an empty text where there is nothing."""
    try:
        mode = os.stat(path, follow_symlinks=follow).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    kinds = {
        stat.S_IFREG: "file",
        stat.S_IFDIR: "folder",
        stat.S_IFIFO: "pipe",
        stat.S_IFSOCK: "socket",
        stat.S_IFLNK: "link",
    }
    return kinds.get(stat.S_IFMT(mode), "device")


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
