"""WorkerProcess: the pool's end of one worker process. Lines of JSON over pipes, every wait with a deadline."""

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

START_S = 120.0  # limit of importing the reward's module


class WorkerDied(Exception):
    """The process ended; the text says how."""


class WorkerProcess:
    """One process of ``coupler.rewards.worker``, in a process group of its own, so that killing it kills its children.

    Must be made by a thread that lives as long as it: Linux ends the process with that thread.
    """

    def __init__(self, target: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "coupler.rewards.worker", target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},  # what we can import, it can
        )
        assert self.process.stdin and self.process.stdout
        self.stdin, self.stdout = (self.process.stdin.fileno(), self.process.stdout.fileno())
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
            CouplerError: it cannot be, with what the process wrote to stderr.
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
            TimeoutError: the process did not read it within ``seconds``.
            WorkerDied: it ended.
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
        """Return the lines that have come, waiting for the first.

        Raises:
            TimeoutError: none came within ``seconds``.
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
        """End the process and its children; ``tail`` then holds its last lines on stderr. May be called twice."""
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
        """End the process and its children; safe from any thread, since pipes stay open for the owner to close."""
        if self.process.returncode is None:  # else its number may be another's by now
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
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def _forward_stderr(self) -> None:
        assert self.process.stderr
        with open(self.process.stderr.fileno(), errors="replace", closefd=False) as lines:
            for line in lines:
                self.tail.append(line.rstrip("\n"))
                sys.stderr.write(line)
        self.process.stderr.close()
