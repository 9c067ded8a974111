"""Find the recipes and examples that come with Coupler, and copy from them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import coupler
from coupler.errors import CouplerError
from coupler.system.files import read_bytes, writing


def shipped(name: str) -> Path:
    """Return the folder ``recipes`` or ``examples``, which a wheel has within the
    package, and a checkout at its root.

    Raises:
        CouplerError: there is none.
    """
    package = Path(coupler.__file__).parent
    for folder in (package / name, package.parents[3] / name):
        if folder.is_dir():
            return folder
    raise CouplerError(f"this installation of Coupler has no {name}.\n  try:  installing it again")


def write_new(files: Mapping[Path, bytes]) -> None:
    """Write files where there are none. One that has these bytes already is kept.

    Raises:
        CouplerError: another file is there, before anything is written, or the disk
            refuses one.
    """
    for path, content in files.items():
        if os.path.lexists(path) and (not path.is_file() or read_bytes(path) != content):
            raise CouplerError(
                f"{path} exists already; nothing was written.\n  try:  another folder"
            )

    for path, content in files.items():
        with writing(f"{path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
