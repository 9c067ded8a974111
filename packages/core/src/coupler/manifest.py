"""What a run was made of: enough to say, later, why two runs differ."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import distributions
from typing import Any

ENVIRONMENT = ("COUPLER_", "CUDA_", "NCCL_", "OMP_", "MKL_", "PYTORCH_", "TORCH_", "HF_", "TOKENIZERS_", "RAY_")
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def describe_run() -> dict[str, Any]:
    """Interpreter, machine, installed versions, git commit, command and the environment that backends read."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "git": _git(),
        "packages": dict(sorted((d.name.lower(), d.version) for d in distributions())),
        "environment": {
            name: "(set)" if any(word in name for word in SECRET) else value
            for name, value in sorted(os.environ.items())
            if name.startswith(ENVIRONMENT)
        },
    }


def _git() -> dict[str, Any] | None:
    """The commit of the working directory, and whether files differ from it; None outside a repository."""

    def ask(*arguments: str) -> str:
        done = subprocess.run(("git", *arguments), capture_output=True, text=True, timeout=10, check=True)  # noqa: S607
        return done.stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "modified": bool(ask("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None
