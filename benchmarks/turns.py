"""A tracker that measures something else after each step, by turns with the job.

The job waits for it, and its step is timed without it. COUPLER_PLUGINS=turns makes the
name known to a job of this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from coupler import Backend, Tracker, hookimpl

after: list[Callable[[Mapping[str, float]], object]] = []
"""What is called after each step, with its metrics."""


class Turns(Tracker):
    """Calls all of :data:`after`."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for each in after:
            each(values)


@hookimpl
def coupler_backends() -> Iterable[Backend]:
    yield Backend(kind="tracker", name="turns", target="turns:Turns")
