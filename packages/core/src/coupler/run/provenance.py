"""Describe what a run was made of, enough to say later why two runs differ."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from email.parser import HeaderParser
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

ENVIRONMENT = (
    "COUPLER_",
    "CUDA_",
    "NCCL_",
    "OMP_",
    "MKL_",
    "PYTORCH_",
    "TORCH_",
    "HF_",
    "TOKENIZERS_",
    "RAY_",
)
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def describe_run(code: Mapping[str, Path]) -> dict[str, Any]:
    """Describe interpreter, machine, installed versions, command, environment and git.

    Of the environment only those variables are kept that backends read.

    Args:
        code: files of what runs, beside core, by what they are.
    """
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "git": checkouts({"coupler": Path(__file__), **code}),
        "packages": installed(),
        "environment": {
            name: "(set)" if any(word in name for word in SECRET) else value
            for name, value in sorted(os.environ.items())
            if name.startswith(ENVIRONMENT)
        },
    }


@cache
def installed() -> Mapping[str, str]:
    """Return the versions of all distributions, by name, when this was first asked."""
    return dict(sorted(found for d in distributions() if (found := _named(d))))


def checkouts(files: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return the git checkouts that hold ``files``.

    Each says where it is, at which commit, whether it was modified since, and which
    files it holds.
    A file that git does not track is left out, for example a package in an environment
    inside a repository.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, file in files.items():
        try:
            _ask(file.parent, "ls-files", "--error-unmatch", file.name)
            folder, commit = _ask(file.parent, "rev-parse", "--show-toplevel", "HEAD").splitlines()

            if folder not in found:
                modified = bool(_ask(file.parent, "status", "--porcelain", "-uno"))
                found[folder] = {"folder": folder, "commit": commit, "modified": modified, "of": []}
            found[folder]["of"].append(name)
        except (
            OSError,
            subprocess.SubprocessError,
        ):  # There is no git here, or no repository of it.
            continue
    return list(found.values())


def _ask(folder: Path, *arguments: str) -> str:
    command = ("git", "-C", str(folder), *arguments)
    return subprocess.run(
        command, capture_output=True, text=True, timeout=10, check=True
    ).stdout.strip()


def _named(dist: Distribution) -> tuple[str, str] | None:
    """Return name and version, or None of a distribution whose metadata is damaged."""
    try:
        # an empty name: a record that is one file, as setup.py wrote it
        texts = map(dist.read_text, ("METADATA", "PKG-INFO", ""))
        text = next(filter(None, texts), "")
    except (OSError, ValueError):
        return None

    # A README of thousands of lines follows the fields.
    fields = HeaderParser().parsestr(text.partition("\n\n")[0])
    name = fields["Name"]
    return (name.lower(), fields["Version"] or "") if name else None
