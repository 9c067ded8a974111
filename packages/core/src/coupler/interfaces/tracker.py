"""Define the destination of a run's numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Tracker(ABC):
    """A destination of a run's numbers, such as a file or a dashboard."""

    def __init__(self, config: Any, run_dir: Path) -> None:
        self.config, self.run_dir = config, run_dir

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of one step. It must not block for long."""

    def rewind(self, step: int) -> None:
        """Forget the steps after ``step``, from which the run goes on.

        Core calls it before :meth:`log`.
        """

    def close(self) -> None:
        """Write everything that is still held back."""
