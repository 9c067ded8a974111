"""Exchange lines of JSON with one worker process, each wait with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque

from coupler.errors import CouplerError

# The reward's module must be imported within this time.
START_S = 120.0


class WorkerDied(Exception):
    """Raised where the process ended. The text says how."""


class WorkerProcess:
    """Own one process of ``coupler.rewards.worker`` in a process group of its own.

    Killing the group kills its children, too. The thread that makes this object must
    live as long as the process, because Linux ends the process with that thread.
    """

    def __init__(self, target: str) -> None:
        # The worker can import everything that this process can.
        path = os.pathsep.join(p for p in sys.path if p)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "coupler.rewards.worker", target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )

        assert self.process.stdin and self.process.stdout
        self.stdin = self.process.stdin.fileno()
        self.stdout = self.process.stdout.fileno()
        os.set_blocking(self.stdin, False)
        self.poller = select.poll()
        self.poller.register(self.stdout, select.POLLIN)
        self.received = b""

        self.tail: deque[str] = deque(maxlen=50)
        self.reader = threading.Thread(target=self._forward_stderr, daemon=True)
        self.reader.start()

    def wait_ready(self, target: str) -> None:
        """Wait until the reward is imported.

        Raises:
            CouplerError: it cannot be imported. The text ends with the last lines that
                the process wrote to stderr.
        """
        why = f"the reward {target} was not imported within {START_S:.0f} s."
        try:
            lines = self.receive(START_S)
            first = json.loads(lines[0])
            if "ready" in first:
                return
            why = first["failed"]
        except WorkerDied as died:
            why = f"the worker of the reward {target} {died} while it imported it."
        except TimeoutError:
            self._dump_stacks()

        self.kill()
        raise CouplerError("\n".join([why.rstrip(), *(f"  stderr:  {line}" for line in self.tail)]))

    def send(self, line: bytes, seconds: float) -> None:
        """Write ``line``.

        Raises:
            TimeoutError: the process did not read the line within ``seconds``.
            WorkerDied: the process ended.
        """
        data = memoryview(line)
        poller = select.poll()
        poller.register(self.stdin, select.POLLOUT)
        deadline = time.monotonic() + seconds

        try:
            while data:
                if not poller.poll(1000 * max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                data = data[os.write(self.stdin, data) :]
        except BrokenPipeError:
            raise WorkerDied(self._ending()) from None

    def receive(self, seconds: float) -> list[bytes]:
        """Wait for a line, and return every line that has come.

        Raises:
            TimeoutError: no line came within ``seconds``.
            WorkerDied: the process ended.
        """
        deadline = time.monotonic() + seconds
        while True:
            *lines, self.received = self.received.split(b"\n")
            if lines:
                return lines

            if not self.poller.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            chunk = os.read(self.stdout, 1 << 20)
            if not chunk:
                raise WorkerDied(self._ending())
            self.received += chunk

    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self, *, dump_stacks: bool = False) -> None:
        """End the process and its children, and fill ``tail``.

        ``tail`` then holds the last lines that the process wrote to stderr. A second
        call does nothing.
        """
        assert self.process.stdin and self.process.stdout
        if self.process.stdin.closed:
            return
        if dump_stacks:
            self._dump_stacks()

        self._kill_group()
        self.process.wait(10)
        self.reader.join(1)
        self.process.stdin.close()
        self.process.stdout.close()

    def terminate(self) -> None:
        """End the process and its children from any thread.

        The pipes stay open, because only the thread that owns them may close them.
        """
        # The number of a process that was waited for may belong to another one by now.
        if self.process.returncode is None:
            self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _dump_stacks(self) -> None:
        """Make faulthandler write where the process hangs, C code included."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
        time.sleep(0.1)

    def _ending(self) -> str:
        try:
            code = self.process.wait(1)
        except subprocess.TimeoutExpired:
            return "closed its pipes"

        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def _forward_stderr(self) -> None:
        assert self.process.stderr
        with open(self.process.stderr.fileno(), errors="replace", closefd=False) as lines:
            for line in lines:
                self.tail.append(line.rstrip("\n"))
                sys.stderr.write(line)
        self.process.stderr.close()
