"""Hash the files of the user that a run imports, to tell when one has changed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from coupler.system.log import get_logger
from coupler.system.tree import flatten

log = get_logger(__name__)

# Key of the manifest: hashes of these files, by options.
FILES = "user_files"
TARGET = re.compile(r"(.+\.py):[^\W\d]\w*")


def hash_user_files(resolved: str) -> dict[str, str]:
    """Return the hash of each file that an option names as ``FILE.py:NAME``, and of
    ``judge.prompt``.

    An option that names several files has one entry for each, as ``key=file``. A file
    that cannot be read is left out, since importing it fails with a sentence.

    Args:
        resolved: the configuration of a run as YAML.
    """
    found = {}

    for key, file in _named(flatten(yaml.safe_load(resolved))):
        # a pipe in its place would not end
        if not Path(file).is_file():
            continue
        try:
            found[f"{key}={file}"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        except OSError:
            continue
    return found


def warn_of_changed_files(then: Any, resolved: str, step: int) -> None:
    """Name files that are not as they were when a checkpoint was made.

    Args:
        then: what :func:`hash_user_files` returned, or None of an older checkpoint.
    """
    if not isinstance(then, Mapping):
        return
    for option, now in hash_user_files(resolved).items():
        if then.get(option, now) != now:
            log.warning(f"{option} was changed since step {step}, and is used as it is now")


def _named(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield option and file of each target, and of the question to a judge."""
    for key, value in options.items():
        if key == "judge.prompt" and value:
            yield key, str(value)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and (target := TARGET.fullmatch(text)):
                yield key, target[1]
