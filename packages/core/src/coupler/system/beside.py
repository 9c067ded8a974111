"""Find what a file of options names beside itself, so that a recipe works from any
folder.
"""

from __future__ import annotations

import os
import re
from glob import glob, has_magic
from pathlib import Path
from typing import Any

# FILE.py:NAME, and the part before the colon.
TARGET = re.compile(r"(.+\.py)(:[^\W\d]\w*)")
# Options that name what a run writes.
WRITTEN = ("run_dir", "profile.path")
# A part of the name of an option that may name a folder.
FOLDERS = re.compile(r"(^|[._])(path|models|source|resume)($|\.)")
# Options that name nothing but a path, so that a name without / and . is one.
PATHS = re.compile(r"([a-z_]+\.)?model\.path|teacher\.models\.[^.]+|(eval\.)?data\.source")


def beside(values: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return the options of ``file`` with paths as seen from the working folder.

    A path that exists beside ``file`` is that one, even where the working folder has
    the same. Any other path is kept, as are those in the ``config.yaml`` that a run
    wrote, which are from the working folder already.
    """
    if file.parent == Path() or os.path.isfile(file.with_name("run.json")):
        return values
    return _moved(values, "", file.parent)


def found_beside(key: str, text: str, folder: Path) -> tuple[str, str]:
    """Return the path in ``folder`` that the option ``key`` names by ``text``, and what
    follows the path. Both are empty where there is none.
    """
    target = TARGET.fullmatch(text)
    name, rest = target.groups() if target else (text, "")
    looks = "/" in name or "." in name or (name and PATHS.fullmatch(key))
    if not looks or "\n" in name or len(name) > 1000 or os.path.isabs(name) or key in WRITTEN:
        return "", ""

    path = os.path.normpath(folder / name)
    there = os.path.isfile(path)
    if not target and FOLDERS.search(key):
        there = os.path.exists(path) or (has_magic(name) and bool(glob(path, recursive=True)))
    return (path, rest) if there else ("", "")


def _moved(value: Any, key: str, folder: Path) -> Any:
    if isinstance(value, dict):
        return {k: _moved(v, f"{key}.{k}" if key else str(k), folder) for k, v in value.items()}
    if isinstance(value, list):
        return [_moved(each, key, folder) for each in value]
    if not isinstance(value, str):
        return value
    return "".join(found_beside(key, value, folder)) or value
