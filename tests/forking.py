"""Starts commands in processes that have everything imported: a server that forks,
since it never ran a thread.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


class Forks:
    """The server, seen from a test."""

    def __init__(self, log: Path) -> None:
        self.log = log
        pipe = subprocess.PIPE
        self.server = subprocess.Popen(
            [sys.executable, __file__, str(log)], stdin=pipe, stdout=pipe, text=True
        )
        self._ask("ready")

    def start(self, argv: list[str]) -> int:
        """Run ``coupler`` with these arguments; return the process's id."""
        return self._ask("start", argv)

    def wait(self, pid: int, seconds: float) -> int | None:
        """The exit code; None while it runs."""
        end = time.monotonic() + seconds
        while (code := self._ask("poll", pid)) is None and time.monotonic() < end:
            time.sleep(0.005)
        return code

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        # 0: it had just ended by itself
        assert self.wait(pid, 10) in (-signal.SIGKILL, 0)

    def close(self) -> None:
        self.server.kill()
        self.server.wait()

    def _ask(self, *message: object) -> int | None:
        assert self.server.stdin and self.server.stdout
        self.server.stdin.write(json.dumps(message) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())


def main() -> None:
    import torch  # noqa: F401
    import transformers  # noqa: F401

    import coupler.jobs  # noqa: F401
    import coupler_algos.grpo
    import coupler_algos.sft  # noqa: F401
    import coupler_engine_fsdp.engine
    import coupler_engine_fsdp.rollout  # noqa: F401

    ended: dict[int, int] = {}
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        answer = None
        if verb == "start":
            answer = os.fork()
            if not answer:
                run(arguments[0])
        elif verb == "poll":
            pid = arguments[0]
            if pid not in ended:
                found, status = os.waitpid(pid, os.WNOHANG)
                ended |= {pid: os.waitstatus_to_exitcode(status)} if found else {}
            answer = ended.get(pid)
        print(json.dumps(answer), flush=True)


def run(argv: list[str]) -> None:
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from coupler.cli import main as coupler

    os._exit(coupler(argv))


if __name__ == "__main__":
    main()
