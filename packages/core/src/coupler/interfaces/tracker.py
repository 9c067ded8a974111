"""Tracker: where the numbers of a run go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Tracker(ABC):
    """Where the numbers of a run go."""

    def __init__(self, config: Any, run_dir: Path) -> None:
        self.config, self.run_dir = config, run_dir

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of one step; must not block for long."""

    def rewind(self, step: int) -> None:
        """The run goes on after ``step``: forget what was recorded of later ones; called before :meth:`log`."""

    def close(self) -> None:
        """Flush."""
