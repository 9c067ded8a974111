"""Run calls that may hang in threads that do not keep the process alive."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any


class DaemonThreads(Executor):
    """Runs calls in threads that Python does not join at its exit.

    It joins those of ``ThreadPoolExecutor``, which would never end with a call that
    hangs.
    """

    def __init__(self, count: int, name: str) -> None:
        # None says that no more calls come.
        self.calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        # The time at which each call was submitted.
        self.under_way: dict[Future[Any], float] = {}
        self.threads = [
            threading.Thread(target=self._serve, name=name, daemon=True) for _ in range(count)
        ]
        for thread in self.threads:
            thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.under_way[future] = time.monotonic()
        future.add_done_callback(self.under_way.pop)
        self.calls.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for future in list(self.under_way) if cancel_futures else ():
            future.cancel()
        for _ in self.threads:
            self.calls.put(None)
        for thread in self.threads if wait else ():
            thread.join()

    def close(self, limit_s: float) -> None:
        """Wait for calls until ``limit_s`` after each was submitted.

        Calls that take longer are left behind.
        """
        self.shutdown(wait=False)
        for future, start in list(self.under_way.items()):
            wait([future], max(0.0, start + limit_s - time.monotonic()))

    def _serve(self) -> None:
        while call := self.calls.get():
            _answer(*call)
            # Its arguments are large, and the next call may be long in coming.
            del call


def _answer(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        # The caller raises it.
        future.set_exception(error)


def in_daemon(function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
    """Call a function in a thread of its own."""
    thread = DaemonThreads(1, function.__name__)
    done = thread.submit(function, *args)
    thread.shutdown(wait=False)
    return asyncio.wrap_future(done)
