"""Define the destination of a run's numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar


class Tracker(ABC):
    """A destination of a run's numbers, such as a file or a dashboard.

    Core calls :meth:`start`, :meth:`rewind` where the run goes on, then :meth:`log`,
    :meth:`samples` and :meth:`picture`, and at the end :meth:`ended` and :meth:`close`.
    """

    in_background: ClassVar[bool] = False
    """True has core make all calls in a thread of their own, where the tracker can
    neither stop nor slow the run. Its failures are a warning."""

    def __init__(self, config: Any, run_dir: Path) -> None:
        self.config, self.run_dir = config, run_dir

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """Learn the id of the run, which it keeps when it goes on, and its resolved
        configuration in plain nested values."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of one step. It must not block for long."""

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record what the policy wrote: the lines of ``samples/step_N.jsonl``."""

    def picture(self, name: str, path: Path) -> None:
        """Record a PNG of the run, which is drawn at its end."""

    def rewind(self, step: int) -> int | None:
        """Forget the steps after ``step``, from which the run goes on.

        Returns:
            the last step that is recorded, or None for all. One that is called in the
            background is given later ones again.
        """

    def ended(self, how: str) -> None:
        """Record ``done``, ``interrupted``, or the first line of the error."""

    def close(self) -> None:
        """Write everything that is still held back."""
