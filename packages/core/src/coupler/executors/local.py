"""Local: one worker of each role in the controller's process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from coupler.executors.handle import Handle
from coupler.executors.placement import Role
from coupler.executors.waits import Waits
from coupler.interfaces import Rank, Rollout, open_transport
from coupler.system.imports import resolve
from coupler.system.log import get_logger
from coupler.system.threads import DaemonThreads, in_daemon

log = get_logger(__name__)

CLOSE_S = 3.0
# for an engine to leave its process group; one that hangs is left behind
LEAVE_S = 15.0


class Local:
    """Keeps every worker in this process.

    Inline, every call runs on the caller's thread, so that ``breakpoint()`` and Ctrl-C
    reach it. Otherwise roles overlap: each worker has a thread of its own, in which an
    async object has an event loop. A call that leaves the caller's
    thread, or awaits, has the deadline of every other wait.
    """

    def __init__(self, inline: bool, waits: Waits) -> None:
        self.inline, self.waits = inline, waits
        self.threads: dict[Handle, DaemonThreads] = {}
        self.loops: dict[Handle, asyncio.AbstractEventLoop] = {}
        # threads of these loops, of which none that hangs keeps the process alive
        self.serving: list[threading.Thread] = []
        self.rollouts: list[Rollout] = []
        # workers of engines
        self.workers: list[Any] = []

    async def place(self, roles: Sequence[Role]) -> None:
        """Take nothing, since whatever this process has is there."""

    def spawn(self, role: str, index: int, build: str, spec: Any, python: str = "") -> Handle:
        handle = Handle(role, index, resolve(build)(spec))
        if isinstance(handle.of, Rollout):
            self.rollouts.append(handle.of)
        elif hasattr(handle.of, "close"):
            self.workers.append(handle.of)
        if not self.inline:
            self.threads[handle] = DaemonThreads(1, f"{role}-{index}")
        return handle

    async def locate(self, handles: Sequence[Handle], ranks: Sequence[Rank]) -> list[Rank]:
        return list(ranks)

    async def revive(self, handle: Handle) -> Handle:
        return handle  # its process is this one

    def put(self, value: Any) -> Any:
        return value

    async def each(
        self,
        handles: Sequence[Handle],
        method: str,
        arguments: Iterable[tuple[Any, ...]],
        *,
        aside: bool = False,
    ) -> list[Any]:
        indices = [handle.index for handle in handles]
        with self.waits.named(handles[0].role, method, indices) as wait:
            bound = [getattr(handle.of, method) for handle in handles]
            awaits = asyncio.iscoroutinefunction(bound[0])
            if self.inline and not aside and not awaits:
                return [call(*args) for call, args in zip(bound, arguments, strict=True)]

            async with self.waits.deadline(wait):
                calls = [
                    in_daemon(call, *args)
                    if self.inline and aside
                    else self._call(handle, call, args, awaits)
                    for handle, call, args in zip(handles, bound, arguments, strict=True)
                ]
                # one request needs no task
                return [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)

    async def call(self, handle: Handle, method: str, *args: Any) -> Any:
        return (await self.each([handle], method, [args]))[0]

    async def _call(self, handle: Handle, bound: Any, args: tuple[Any, ...], awaits: bool) -> Any:
        if not awaits:
            return await asyncio.get_running_loop().run_in_executor(
                self.threads[handle], bound, *args
            )
        if self.inline:
            return await bound(*args)
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(bound(*args), self._loop(handle))
        )

    def _loop(self, handle: Handle) -> asyncio.AbstractEventLoop:
        if handle not in self.loops:
            runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
            self.loops[handle] = runner.get_loop()
            name = f"{handle.role}-{handle.index}"
            serving = threading.Thread(target=_serve, args=(runner,), name=name, daemon=True)
            self.serving.append(serving)
            serving.start()
        return self.loops[handle]

    async def reads(self) -> set[str]:
        """Return nothing, since what this process reads is recorded in it."""
        return set()

    def close(self) -> None:
        """Wait for calls under way, each until its deadline.

        A call that hangs is left behind.
        """
        self.waits.close()
        for rollout in self.rollouts:
            rollout.close()
        for loop in self.loops.values():
            loop.call_soon_threadsafe(loop.stop)
        for thread in self.serving:
            thread.join(CLOSE_S)
        for pool in self.threads.values():
            pool.close(self.waits.deadline_s)
        for worker in self.workers:
            _close(worker)
        # What a receiver has not read is of no run that comes later.
        open_transport.cache_clear()


def _serve(runner: asyncio.Runner) -> None:
    """Run an event loop until it is stopped, and cancel what is left on it."""
    with runner:
        runner.get_loop().run_forever()


def _close(worker: Any) -> None:
    """Close a worker in a thread that may hang, and log a failure.

    Raised, it would hide that of the run.
    """
    ending = DaemonThreads(1, "close")
    done = ending.submit(worker.close)
    ending.shutdown(wait=False)
    try:
        done.result(LEAVE_S)
    except TimeoutError:
        log.warning(f"an engine did not close within {LEAVE_S:g} s; it is left behind.")
    except Exception as error:  # an engine is third-party code
        log.warning(f"an engine failed to close: {error}")
