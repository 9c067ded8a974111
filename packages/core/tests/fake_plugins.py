"""Distributions as folders: a module and the ``dist-info`` that pip would write. Real
wheels take too long.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

PLUGIN = """
from __future__ import annotations
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from dataclasses import field
import coupler
from coupler.plugins import Backend, hookimpl

class Shape(StrEnum):
    ROUND = "round"
    FLAT = "very_flat"

@dataclass
class Inner:
    width: int = 2

    def __post_init__(self):
        if self.width < 1:
            raise ValueError("width must be at least 1")

@dataclass
class Config({base}):
    name: str = "{name}"
    lr: float = 1e-3  # learning rate
    shape: Shape = Shape.ROUND
    inner: Inner = field(default_factory=Inner)
    extra_args: dict[str, Any] = field(default_factory=dict)

@hookimpl
def coupler_backends():
    return [Backend(kind="{kind}", name="{name}", target="not_there:Never", config=Config,
                    api={api}, capabilities=frozenset({{"weights:full"}}))]
"""


BASE = {"engine": "coupler.EngineConfig", "rollout": "coupler.RolloutConfig"}


def plugin(kind: str, name: str, api: int = 1) -> str:
    return PLUGIN.format(kind=kind, name=name, api=api, base=BASE.get(kind, "object"))


def install(folder: Path, dist: str, source: str, version: str = "0.1.0", entry: str = "") -> str:
    """Install a plugin module into ``folder``; return the module's name."""
    module = dist.replace("-", "_")
    (folder / f"{module}.py").write_text(dedent(source))
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(
        f"[coupler]\n{entry or dist.rpartition('-')[2]} = {module}\n"
    )
    return module


def run(
    *arguments: str, folders: tuple[Path, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``coupler`` in a fresh interpreter that has these folders on its path."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COUPLER_")}
    environment |= {
        "PYTHONPATH": os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")]),
        **variables,
    }
    command = [sys.executable, "-m", "coupler.cli", *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
