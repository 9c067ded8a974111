"""Run one program, from any thread and without an event loop of one's own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence

from coupler_agents.sandbox.fusion import run_at
from coupler_agents.sandbox.limits import SandboxLimits
from coupler_agents.sandbox.ran import Ran, check_files
from coupler_agents.sandbox.sandbox import Sandbox

STANDARD = SandboxLimits()


class Runner:
    """Own a sandbox and the thread that speaks with it, for all other threads."""

    def __init__(self, limits: SandboxLimits) -> None:
        self.loop = asyncio.new_event_loop()
        self.sandbox = Sandbox(limits)
        # It ends with the process, and Linux ends the sandbox with it.
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self.sandbox.start(), self.loop).result()

    def run(
        self,
        code: str,
        timeout_s: float,
        files: dict[str, str],
        stdin: str,
        fetch: Sequence[str],
    ) -> Ran:
        """Run one program."""

        async def run() -> Ran:
            interpreter = await self.sandbox.interpreter(fetch=fetch, apart=True)
            return await interpreter.run(code, timeout_s, files, stdin)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result()


_lock = threading.Lock()
# A fork has none of the threads of its parent, and makes runners of its own.
_runners: dict[tuple[int, SandboxLimits], Runner] = {}


def run_python(
    code: str,
    *,
    stdin: str = "",
    files: Mapping[str, str] | None = None,
    fetch: Sequence[str] = (),
    timeout_s: float = 10.0,
    limits: SandboxLimits = STANDARD,
    url: str = "",
) -> Ran:
    """Run a Python program in the sandbox, and wait for its end.

    It blocks, so that coroutines call it by ``asyncio.to_thread``. The first call
    starts the sandbox, which later calls of this process share.

    Args:
        code: the program, as ``python program.py`` would run it.
        files: texts by name, in the folder where the program starts.
        fetch: names of files to return, as the program left them.
        timeout_s: seconds after which it is ended.
        url: the address of a sandbox-fusion server, to run it there.

    Raises:
        SandboxFailed: there is no sandbox, or it does not work.
    """
    given = check_files(dict(files or {}), "files")
    if url:
        return run_at(url, code, timeout_s, given, stdin, fetch, limits)

    with _lock:
        key = (os.getpid(), limits)
        if key not in _runners:
            _runners[key] = Runner(limits)
    return _runners[key].run(code, timeout_s, given, stdin, fetch)
