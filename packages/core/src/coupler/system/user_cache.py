"""Keep JSON in the user's cache folder.

Whatever is wrong with the folder or a file, there is nothing in the cache then. Nobody
but the user can read or write what is used.
"""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress
from json import dumps, loads
from pathlib import Path
from typing import Any

MAX_BYTES = 8 << 20


def cache_folder() -> Path | None:
    """Return the folder of the cache, which may not exist, or None without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    with suppress(RuntimeError):
        root = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
        return root / "coupler"
    return None


def read_cached(name: str) -> dict[str, Any]:
    """Return the object that :func:`write_cached` wrote last, or an empty one."""
    folder = cache_folder()

    try:
        if folder is None or not _is_ours(
            os.lstat(folder),
            stat.S_ISDIR,
        ):
            return {}
        file = os.open(
            folder / name,
            os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK,
        )
        with open(file, "rb") as opened:
            if not _is_ours(os.fstat(file), stat.S_ISREG):
                return {}
            digest, _, text = opened.read(MAX_BYTES).partition(b"\n")
        if digest.decode() != hashlib.sha256(text).hexdigest():
            return {}
        found = loads(text)
    except (OSError, ValueError, RecursionError, MemoryError):
        return {}
    return found if isinstance(found, dict) else {}


def write_cached(name: str, values: dict[str, Any]) -> None:
    """Replace the object, if that is possible."""
    folder = cache_folder()
    text = dumps(values).encode()
    if folder is None or len(text) + 100 > MAX_BYTES:
        return

    part = folder / f"{name}.{os.getpid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(os.lstat(folder), stat.S_ISDIR):
            return
        file = os.open(
            part,
            os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW,
            0o600,
        )
        try:
            with open(file, "wb") as opened:
                opened.write(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
            os.replace(part, folder / name)
        except OSError:
            part.unlink()


def _is_ours(status: os.stat_result, kind: Any) -> bool:
    """Tell whether something is of this kind, and nobody else can have written it."""
    return bool(
        kind(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
    )
