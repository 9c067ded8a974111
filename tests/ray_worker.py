"""A worker that misbehaves on demand; test_ray.py has it built in actors."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np

from coupler.errors import ConfigError


class Unknown(Exception):
    """No other process can import it: its module is a file."""


class Probe:
    def __init__(self, spec: str) -> None:
        if spec == "broken":
            raise ConfigError("engine.lr is odd.\n  try:  engine.lr=1")

    def fail(self, index: int) -> int:
        print("one line before the end", flush=True)
        if index == 1:
            raise Unknown("boom")
        time.sleep(60)
        return index

    def refuse(self) -> None:
        raise ConfigError("engine.lr is odd.\n  try:  engine.lr=1")

    def die(self, index: int) -> None:
        """Rank 1 dies; rank 0 sees its peer go away first, as in a collective."""
        print("dying soon", file=sys.stderr)
        if index == 0:
            raise RuntimeError("Connection closed by peer")
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def look(self, column: np.ndarray) -> tuple[bool, bool, float]:
        return column.flags.writeable, column.flags.owndata, float(column.sum())

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def stop(self) -> Any:
        sys.exit(3)
