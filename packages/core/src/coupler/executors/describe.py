"""Print what one interpreter has, for another one to compare.

``python -m coupler.executors.describe --json`` runs it.
"""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from coupler.interfaces import API
from coupler.plugins.manager import CORE, Plugins


def describe() -> dict[str, Any]:
    """Return the versions of this interpreter, and its plugins. Imports no backend."""
    return {**versions(), "plugins": [asdict(row) for row in Plugins.load().rows()]}


def versions() -> dict[str, Any]:
    """Return what two interpreters of one run must have in common."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "ray": _version("ray"),
        "core": version(CORE),
        "api": API,
    }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    if sys.argv[1:] != ["--json"]:
        sys.exit("usage: python -m coupler.executors.describe --json")
    print(json.dumps(describe(), indent=2))
