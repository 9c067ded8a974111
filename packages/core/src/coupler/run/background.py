"""Call a tracker in a thread of its own, so that it can neither stop nor slow a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import nan
from pathlib import Path
from queue import Full, Queue
from typing import Any

from coupler.errors import CouplerError
from coupler.interfaces import Tracker
from coupler.run.history import numbers_of
from coupler.system.contained import shortened
from coupler.system.log import get_logger

# Calls that wait for a tracker. What comes above them is dropped and counted.
MAX_CALLS = 1000
# The end of a run waits so long for a tracker to take the rest.
CLOSE_S = 60.0

log = get_logger(__name__)


class Background(Tracker):
    """Hands every call to a tracker over to its thread.

    The first failure is a warning. What was lost is counted and said at the end.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        super().__init__(tracker.config, tracker.run_dir)
        self.name, self.tracker = name, tracker
        self.given = self.lost = 0
        self.counting = threading.Lock()
        self.last: list[Callable[[], None]] = []

        # None says that no more calls come.
        self.calls: Queue[Callable[[], None] | None] = Queue(MAX_CALLS)
        self.thread = threading.Thread(target=self._serve, name=f"tracker-{name}", daemon=True)
        self.thread.start()

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        self._give(self.tracker.start, run, config)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._give(self.tracker.log, step, dict(values))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._give(self.tracker.samples, step, rows)

    def picture(self, name: str, path: Path) -> None:
        self._give(self.tracker.picture, name, path)

    def rewind(self, step: int) -> None:
        self._give(self._rewind, step)

    def ended(self, how: str) -> None:
        self.last.append(partial(self.tracker.ended, how))

    def close(self) -> None:
        """Wait until the tracker has taken everything, and at most ``CLOSE_S``."""
        end = time.monotonic() + CLOSE_S
        for call in (*self.last, self.tracker.close, None):
            with suppress(Full):
                self.calls.put(call, timeout=max(0.0, end - time.monotonic()))
        self.thread.join(max(0.0, end - time.monotonic()))

        if self.thread.is_alive():
            log.warning(
                f"tracker {self.name} did not take the rest within {CLOSE_S:.0f} s of the end of "
                f"the run: {self.calls.qsize()} calls are lost, and {self.lost} were before"
            )
        elif self.lost:
            log.warning(f"tracker {self.name} lost {self.lost} of {self.given} calls")

    def _give(self, call: Callable[..., None], *arguments: Any) -> None:
        self.given += 1
        try:
            self.calls.put_nowait(partial(call, *arguments))
        except Full:
            self._lose(f"tracker {self.name} is slow, and the run goes on without it for now")

    def _rewind(self, step: int) -> None:
        """Give the tracker again what waited for it when the run was killed."""
        last = self.tracker.rewind(step)
        for row in numbers_of(self.run_dir) if last is not None else ():
            if last < (number := row.pop("step")) <= step:
                self.tracker.log(number, {k: nan if v is None else v for k, v in row.items()})

    def _serve(self) -> None:
        while call := self.calls.get():
            try:
                call()
            # third-party code may do anything; it is shown
            except (Exception, SystemExit) as error:
                first = str(error).strip().partition("\n")[0]
                kind = "" if isinstance(error, CouplerError) else f"{type(error).__name__}: "
                said = shortened(kind + first)
                self._lose(f"tracker {self.name} failed, and the run goes on: {said}")

    def _lose(self, why: str) -> None:
        # Both threads lose calls.
        with self.counting:
            self.lost += 1
            first = self.lost == 1
        if first:
            log.warning(why)
