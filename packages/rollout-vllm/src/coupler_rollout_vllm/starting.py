"""Start an engine in two steps: its processes early, and late what takes a device.

Its processes spend half of a warm start with imports, and engines of training load in
the meantime.
"""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import Future
from multiprocessing import active_children
from threading import Thread
from typing import Any

from coupler.engine_kit.inference.gate import Gate
from coupler_rollout_vllm.compat import engine as vllm
from coupler_rollout_vllm.worker.gate import GATE


class Starting:
    """An engine on its way, whose workers wait at a gate."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Return when the engine's process runs. See
        :func:`~coupler_rollout_vllm.arguments.engine_arguments`.
        """
        self.gate = Gate()
        self.engine: Future[Any] = Future()

        before, started = set(active_children()), set()
        os.environ[GATE] = self.gate.path
        Thread(target=self._start, args=(arguments,), name="vllm-start", daemon=True).start()
        # Imports of two threads can meet, and a second replica of this process needs
        # the variable.
        while not self.engine.done() and not started:
            time.sleep(0.005)
            started = set(active_children()) - before
        self.processes = started
        del os.environ[GATE]

    def _start(self, arguments: dict[str, Any]) -> None:
        self.engine.set_running_or_notify_cancel()
        try:
            engine = vllm.start(arguments)
        except BaseException as error:
            self.engine.set_exception(error)
        else:
            self.engine.set_result(engine)

    async def ready(self) -> Any:
        """Open the gate, and wait for the engine.

        Raises:
            MemoryError: the device has too little memory for it.
            CouplerError: it did not start.
        """
        self.gate.open()
        try:
            engine = await asyncio.wrap_future(self.engine)
        except BaseException:
            self.give_up()
            raise

        self.gate.close()
        return engine

    def give_up(self) -> None:
        """End the engine's processes."""
        for process in self.processes:
            process.kill()
        self.gate.close()
        self.engine.add_done_callback(_stop)


def _stop(engine: Future[Any]) -> None:
    if not engine.exception():
        vllm.stop(engine.result())
