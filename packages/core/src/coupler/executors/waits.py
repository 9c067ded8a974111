"""Wait for workers, with a name and a deadline for each wait.

A wait is announced while it lasts, and ends with the root cause.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from coupler.errors import WaitTimeout, WorkerDied
from coupler.system.log import URGENT, get_logger

log = get_logger(__name__)

# numbers of what is outstanding
SHOWN = 16
# after a worker failed: its peer may have died, and then the death is the cause, which
# a busy machine tells late
GRACE_S = 3.0


@dataclass(slots=True, eq=False)
class Wait:
    """A call under way, or something else that is waited for.

    An example are the ``completions`` of ``prompts``, by their rows.
    """

    role: str
    method: str
    # indices of workers that have not answered, or of rows
    outstanding: set[int]
    start: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return f"{self.method} of {self.role} {_listed(self.outstanding)}"


class Waits:
    """Every call under way in this process.

    A thread beside it says on stderr what lasts, even while the caller blocks.

    Example:
        ``coupler: waiting 60 s for train of policy [1, 3]``
    """

    def __init__(self, deadline_s: float, heartbeat_s: float) -> None:
        self.deadline_s, self.heartbeat_s = deadline_s, heartbeat_s
        self.current: dict[int, Wait] = {}
        self.stop = threading.Event()
        self.thread: threading.Thread | None = None

    @contextmanager
    def named(self, role: str, method: str, indices: Sequence[int]) -> Iterator[Wait]:
        """Announce a call for as long as the block lasts."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self.thread.start()
        wait = Wait(role, method, set(indices))
        self.current[id(wait)] = wait
        try:
            yield wait
        finally:
            del self.current[id(wait)]

    @asynccontextmanager
    async def deadline(self, wait: Wait) -> AsyncIterator[None]:
        """Cancel what the block waits for after ``deadline_s``.

        Raises:
            WaitTimeout: it lasted so long.
        """
        limit = asyncio.timeout(self.deadline_s)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._expired(wait) from None

    def _expired(self, wait: Wait) -> WaitTimeout:
        return WaitTimeout(
            f"waited {self.deadline_s:g} s for {wait}.\n"
            "  look at:  the log of that worker; the limit is waits.deadline_s"
        )

    async def gather(
        self,
        role: str,
        method: str,
        indices: Sequence[int],
        calls: Sequence[Awaitable[Any]],
        death: asyncio.Future[Any],
    ) -> list[Any]:
        """Wait for all calls, and return one result per call, in order.

        Args:
            death: fails with :class:`WorkerDied` when a worker of any role dies, which
                ends this wait too.

        Raises:
            WorkerDied: a worker died, of this call or another.
            WaitTimeout: ``deadline_s`` passed.
            BaseException: what the first call raised, unless a death explains it. The
                other calls are cancelled.
        """
        tasks = [asyncio.ensure_future(call) for call in calls]
        failed: list[BaseException] = []

        with self.named(role, method, indices) as wait:
            for index, task in zip(indices, tasks, strict=True):
                task.add_done_callback(lambda done, index=index: _note(done, index, wait, failed))
            everything = asyncio.ensure_future(
                asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            )
            try:
                await asyncio.wait(
                    {everything, death},
                    timeout=self.deadline_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if failed:
                    await asyncio.wait({death}, timeout=GRACE_S)
                if death.done():
                    await death
                if failed:
                    raise next((e for e in failed if isinstance(e, WorkerDied)), failed[0])
                if not everything.done():
                    raise self._expired(wait)
                return [task.result() for task in tasks]
            finally:
                for task in (everything, *tasks):
                    task.cancel()

    def _beat(self) -> None:
        while not self.stop.wait(self.heartbeat_s):
            for line in self.overdue():
                log.info(line, extra=URGENT)

    def overdue(self) -> list[str]:
        """Return a line for each method and role that lasts for ``heartbeat_s``."""
        now, found = time.monotonic(), defaultdict(list)
        for wait in list(self.current.values()):
            if now - wait.start >= self.heartbeat_s:
                found[wait.method, wait.role].append(wait)

        lines = []
        for (method, role), waits in found.items():
            indices = _listed({index for wait in waits for index in wait.outstanding.copy()})
            calls = f" ({len(waits)} calls)" if len(waits) > 1 else ""
            lines.append(
                f"waiting {now - min(w.start for w in waits):.0f} s for {method} of {role} "
                f"{indices}{calls}"
            )
        return lines

    def close(self) -> None:
        """End the thread, if there is one."""
        self.stop.set()
        if self.thread:
            self.thread.join(GRACE_S)


def _listed(indices: set[int]) -> str:
    first = sorted(indices)[:SHOWN]
    return str(first) + (f" and {len(indices) - SHOWN} more" if len(indices) > SHOWN else "")


def _note(done: asyncio.Future[Any], index: int, wait: Wait, failed: list[BaseException]) -> None:
    wait.outstanding.discard(index)
    if not done.cancelled() and (error := done.exception()) is not None:
        failed.append(error)
