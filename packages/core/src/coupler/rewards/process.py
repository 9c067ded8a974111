"""Exchange lines with one worker process, each wait with a deadline.

A supervisor stands between: it ends the worker and all that this started when it is
asked to, when a limit is exceeded, and when this process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from coupler.errors import CouplerError
from coupler.rewards import sandbox
from coupler.system import supervisor
from coupler.system.process_memory import machine_bytes

# The reward's module must be imported within this time.
START_S = 120.0
# A supervisor that takes longer to end its processes was itself stopped or killed.
END_S = supervisor.END_S + 2
# For the supervisor, and a process that hangs, to write where it hangs.
STACKS_S = 2.0
MARK = "COUPLER_REWARD"
# The longest answer, and the longest line of output that is shown as one.
MAX_ANSWER, MAX_LINE = 16 << 20, 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """Say what a reward process may take, and whether it runs in the sandbox.

    The fields are those options of ``reward`` that have the same names.
    """

    sandbox: str = "auto"
    max_memory_gib: float = 0.0
    max_processes: int = 2000

    def watched(self, control: int) -> list[str]:
        """Return the words before a command that a supervisor holds to these limits.

        ``control`` is as :func:`coupler.system.supervisor.watched` takes it.
        """
        memory = int(self.max_memory_gib * (1 << 30)) or machine_bytes() // 2
        return supervisor.watched(control, memory, self.max_processes)


@dataclass(frozen=True, slots=True)
class Calling:
    """Say how a worker calls the function.

    Attributes:
        key: the option that names the function, for messages.
        args: keyword arguments of every call, of a class those that make it.
        timeout_s: seconds that one call of an async function may take.
    """

    key: str = "reward.target"
    args: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 10.0


class Mode(StrEnum):
    """How a worker deals with a reward that asks for the sandbox."""

    # It says so, and ends.
    ASK = "ask"
    # It is in the sandbox.
    BUBBLEWRAP = sandbox.Kind.BUBBLEWRAP
    # It goes into the sandbox when it has made the reward.
    SECCOMP = sandbox.Kind.SECCOMP
    # The user wants none.
    OFF = "off"


class WorkerDied(Exception):
    """Raised where the process ended. The text says how.

    ``blame`` is True where the call under way is certainly the reason.
    """

    def __init__(self, how: str, *, blame: bool = False) -> None:
        super().__init__(how)
        self.blame = blame


class WorkerProcess:
    """Own one process of ``coupler.rewards.worker``, and all that it starts.

    The thread that makes this object must live as long as the process, because Linux
    ends the process with that thread.
    """

    def __init__(
        self,
        target: str,
        limits: Limits,
        mode: Mode,
        opinions: Sequence[str] = (),
        calling: Calling | None = None,
    ) -> None:
        self.control, theirs = socket.socketpair()
        self.token = secrets.token_hex(16)
        # Where the supervisor was killed, this finds what it left behind.
        self.mark = f"{MARK}={secrets.token_hex(8)}"
        self.process = subprocess.Popen(
            [
                *limits.watched(theirs.fileno()),
                *(sandbox.command(target) if mode is Mode.BUBBLEWRAP else ()),
                *(sys.executable, "-m", "coupler.rewards.worker", target, mode, *opinions),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            pass_fds=[theirs.fileno()],
            env=self._environment(mode),
        )
        theirs.close()

        assert self.process.stdin and self.process.stdout
        self.stdin = self.process.stdin.fileno()
        self.stdout = self.process.stdout.fileno()
        os.set_blocking(self.stdin, False)
        self.poller = select.poll()
        self.poller.register(self.stdout, select.POLLIN)
        self.poller.register(self.control, select.POLLIN)
        self.received = b""
        self.answered = 0
        self.junk = False
        self.calling = calling or Calling()
        # What Signature.facts said of the function.
        self.facts: dict[str, Any] = {}

        self.tail: deque[str] = deque(maxlen=50)
        self.num_lines = 0
        self.reader = threading.Thread(target=self._forward_stderr, daemon=True)
        self.reader.start()

    def wait_ready(self, target: str) -> bool:
        """Wait until the reward is imported, and return whether it wants the sandbox.

        Raises:
            CouplerError: it cannot be imported. The text ends with the last lines that
                the process wrote to stderr.
        """
        why = f"the reward {target} was not imported within {START_S:.0f} s."
        try:
            self.send(f"{self.token}\n{json.dumps(asdict(self.calling))}\n".encode(), START_S)
            (line, *_) = self.receive(START_S)
            first: dict[str, Any] = json.loads(line)
            if "sandbox" in first:
                self.answered = 0
                self.facts = first
                return bool(first["sandbox"])
            why = str(first["failed"])
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
            raise self._ending() from None

    def receive(self, seconds: float) -> list[bytes]:
        """Wait for an answer, and return every answer that has come.

        A line is an answer if it opens with the token and the number of the next call.

        Raises:
            TimeoutError: no line came within ``seconds``.
            WorkerDied: the process ended, or it wrote something else.
        """
        deadline = time.monotonic() + seconds
        while True:
            if answers := self._answers():
                return answers
            if self.junk:
                raise WorkerDied("wrote into the pipe of its answers")

            ready = self.poller.poll(1000 * max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            if self.stdout not in [descriptor for descriptor, _ in ready]:
                raise self._ending()
            chunk = os.read(self.stdout, 1 << 20)
            if not chunk:
                raise self._ending()
            self.received += chunk

    def _answers(self) -> list[bytes]:
        *lines, self.received = self.received.split(b"\n")
        self.junk = self.junk or len(self.received) > MAX_ANSWER
        answers: list[bytes] = []

        for line in lines:
            opening = b"%s %d " % (self.token.encode(), self.answered)
            self.junk = self.junk or not line.startswith(opening)
            if self.junk:
                break
            answers.append(line[len(opening) :])
            self.answered += 1
        return answers

    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self, *, dump_stacks: bool = False) -> None:
        """End the process and all that it started, and fill ``tail``.

        ``tail`` then holds the last lines that the process wrote to stderr. A second
        call does nothing.
        """
        assert self.process.stdin and self.process.stdout
        if self.process.stdin.closed:
            return
        if dump_stacks:
            self._dump_stacks()

        self.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            supervisor.end_below(self.process.pid)
            self.process.kill()
        if self.process.wait(END_S):
            # It does not end like that, so something killed it.
            supervisor.end_marked(self.mark.encode())
        self.reader.join(1)
        self.process.stdin.close()
        self.process.stdout.close()
        self.control.close()

    def terminate(self) -> None:
        """Begin to end the process and its children, from any thread.

        The pipes stay open, because only the thread that owns them may close them.
        """
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)

    def _dump_stacks(self) -> None:
        """Make faulthandler write where the process hangs, C code included, and wait
        until it has begun.
        """
        before, until = self.num_lines, time.monotonic() + STACKS_S
        with contextlib.suppress(OSError):
            self.control.send(b"s")
        while self.num_lines == before and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.1)

    def _ending(self) -> WorkerDied:
        """Return how the process ended, as the supervisor says."""
        self.control.settimeout(1)

        try:
            said = json.loads(self.control.recv(4096))
            return WorkerDied(str(said["how"]), blame=bool(said["blame"]))
        except TimeoutError:
            return WorkerDied("closed its pipes")
        except (OSError, ValueError, LookupError, TypeError):
            return WorkerDied("killed the process that watches it")

    def _environment(self, mode: Mode) -> dict[str, str]:
        # The worker can import everything that this process can.
        path = os.pathsep.join(str(Path(p).absolute()) for p in sys.path if p)
        sandboxed = mode in (Mode.BUBBLEWRAP, Mode.SECCOMP)
        given = sandbox.environment() if sandboxed else dict(os.environ)
        name, _, value = self.mark.partition("=")
        return {**given, "PYTHONPATH": path, name: value}

    def _forward_stderr(self) -> None:
        assert self.process.stderr
        with open(self.process.stderr.fileno(), errors="replace", closefd=False) as lines:
            while line := lines.readline(MAX_LINE):
                self.tail.append(line.rstrip("\n"))
                self.num_lines += 1
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(line)
        self.process.stderr.close()
