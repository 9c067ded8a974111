"""What a run was made of: enough to say, later, why two runs differ."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ENVIRONMENT = ("COUPLER_", "CUDA_", "NCCL_", "OMP_", "MKL_", "PYTORCH_", "TORCH_", "HF_", "TOKENIZERS_", "RAY_")
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def describe_run(code: Mapping[str, Path]) -> dict[str, Any]:
    """Interpreter, machine, installed versions, command, the environment that backends read, and git.

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


def installed() -> dict[str, str]:
    """Versions of all distributions, by name."""
    return dict(sorted((d.name.lower(), d.version) for d in distributions()))


def checkouts(files: Mapping[str, Path]) -> list[dict[str, Any]]:
    """The git checkouts that hold ``files``: where, at which commit, whether it was modified since, and which files.

    A file that git does not track is left out: a package in an environment inside a repository is not of that one.
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
        except (OSError, subprocess.SubprocessError):  # no git, or none of its business
            continue
    return list(found.values())


def _ask(folder: Path, *arguments: str) -> str:
    command = ("git", "-C", str(folder), *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
