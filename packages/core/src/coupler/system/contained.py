"""Call functions of other people's code in processes of their own.

A call may hang, exit, print, start threads, or change whatever there is: its caller
gets an answer, or one sentence about what went wrong, and nothing else.

One supervisor has a child per call. It ends with the caller, also where that is killed,
and takes every process with it that a call has started.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from json import dumps, loads
from selectors import EVENT_READ, DefaultSelector
from typing import NoReturn

from coupler.system.child import Answer, Call, be_child, ending, shield, shortened, write_line
from coupler.system.process_memory import resident_bytes
from coupler.system.processes import queued_seconds
from coupler.system.reaping import adopt_orphans, children, kill_children

# of one call
MAX_ANSWER_BYTES = 1 << 20
MAX_MEMORY_BYTES = 4 << 30
# of what a call prints, the end is kept
TAIL_BYTES = 2000
# how often a child is looked at that says nothing
LOOK_S = 0.05
CLOSE_S = 2.0
# A call that hangs keeps its place up to its limit.
PARALLEL = 16
BOOT = (
    "import sys; sys.path[:] = sys.argv[1:]; from coupler.system import contained; contained.main()"
)


class Contained:
    """Runs calls, at most ``parallel`` at once, each for at most ``limit_s``, without
    the time for which it waits for a processor.

    Args:
        calls: by any name.

    Attributes:
        pending: the names of calls without an answer.
    """

    def __init__(
        self,
        calls: Mapping[str, Call],
        limit_s: float,
        parallel: int = PARALLEL,
    ) -> None:
        self._calls, self._limit_s, self._parallel = dict(calls), limit_s, parallel
        self._supervisors: list[_Supervisor] = []
        if calls:
            self._supervise(calls)

    @property
    def pending(self) -> list[str]:
        return [name for supervisor in self._supervisors for name in supervisor.pending]

    def wait(self, seconds: float | None = None) -> dict[str, Answer]:
        """Return the answers that come next, by name, or none after ``seconds``.

        None waits for as long as calls may take.
        """
        waiting = [s.answers for s in self._supervisors]
        if not waiting:
            return {}

        if seconds is not None:
            seconds = max(0, seconds)
        ready, _, _ = select.select(waiting, [], [], seconds)
        answers: dict[str, Answer] = {}
        for supervisor in [s for s in self._supervisors if s.answers in ready]:
            answers |= supervisor.read()
            if supervisor.ended and supervisor.pending:
                answers |= self._blame(supervisor)
            if not supervisor.pending or supervisor.ended:
                supervisor.close()
                self._supervisors.remove(supervisor)
        return answers

    def all(self) -> dict[str, Answer]:
        """Wait for every call."""
        answers: dict[str, Answer] = {}
        while self._supervisors:
            answers |= self.wait()
        return answers

    def close(self) -> None:
        """End every call that is under way, with its processes."""
        for supervisor in self._supervisors:
            supervisor.close()
        self._supervisors.clear()

    def _blame(self, ended: _Supervisor) -> dict[str, Answer]:
        """Find the call that killed the supervisor: each has one of its own now."""
        if len(ended.pending) == 1 or len(ended.calls) == 1:
            return dict.fromkeys(
                ended.pending,
                Answer(error="it ended the process that called it"),
            )
        for name in ended.pending:
            self._supervise({name: self._calls[name]})
        return {}

    def _supervise(self, calls: Mapping[str, Call]) -> None:
        self._supervisors.append(
            _Supervisor(
                _Task(
                    dict(calls),
                    self._limit_s,
                    self._parallel,
                )
            )
        )


@dataclass(frozen=True, slots=True)
class _Task:
    calls: dict[str, Call]
    limit_s: float
    parallel: int


class _Supervisor:
    """Holds the caller's end of one supervisor.

    It is forked where the caller has one thread only, since that takes milliseconds. A
    new interpreter takes the place of the fork elsewhere.
    """

    def __init__(self, task: _Task) -> None:
        self.calls, self.pending = task.calls, list(task.calls)
        self.ended, self._closed, self._received = False, False, b""
        self._owner = os.getpid()

        control, self._control = os.pipe()
        self.answers, answers = os.pipe()
        if threading.active_count() == 1:
            self._pid = os.fork()
            if not self._pid:
                _be_supervisor(
                    task,
                    control,
                    answers,
                    theirs=(self._control, self.answers),
                )
        else:
            self._pid = _spawn(
                task,
                control,
                answers,
                self._control,
            )
        os.close(control)
        os.close(answers)

    def read(self) -> dict[str, Answer]:
        """Take what has come. An answer that is none ends the supervisor."""
        chunk = os.read(self.answers, 1 << 16)
        self.ended = not chunk
        *lines, self._received = (self._received + chunk).split(b"\n")

        answers = {}
        for line in lines:
            said = loads(line)
            name = said.pop("name")
            self.pending.remove(name)
            answers[name] = Answer(**{**said, "files": tuple(said["files"])})
        return answers

    def close(self) -> None:
        """End the supervisor. A fork of the caller leaves it alone."""
        if self._closed or self._owner != os.getpid():
            return
        self._closed = True
        # A fork of this process may hold the pipe open, too.
        with suppress(BrokenPipeError):
            os.write(self._control, b"\n")
        os.close(self._control)
        os.close(self.answers)

        deadline = time.monotonic() + CLOSE_S
        with suppress(ChildProcessError):
            while os.waitpid(
                self._pid,
                os.WNOHANG,
            ) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(self._pid, signal.SIGKILL)
                    deadline = float("inf")
                time.sleep(0.002)


def _be_supervisor(
    task: _Task, control: int, answers: int, theirs: tuple[int, ...] = ()
) -> NoReturn:
    """Be the supervisor, in a fork of the caller, of which nothing else goes on."""
    try:
        for pipe in theirs:
            os.close(pipe)
        with suppress(PermissionError):
            os.setsid()

        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        _supervise(task, control, answers)
    finally:
        os._exit(0)


def _spawn(
    task: _Task,
    control: int,
    answers: int,
    write: int,
) -> int:
    """Start an interpreter that is the supervisor. Its first line says what to do."""
    process = subprocess.Popen(
        [sys.executable, "-c", BOOT, *sys.path],
        stdin=control,
        stdout=answers,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    # Its exit code is taken by its number.
    process.returncode = 0

    with suppress(BrokenPipeError):
        write_line(write, dumps(asdict(task)))
    return process.pid


def main() -> NoReturn:
    """Be the supervisor, in an interpreter of its own."""
    control, answers = os.dup(0), os.dup(1)
    received = b""
    while not received.endswith(b"\n"):
        if not (chunk := os.read(control, 1 << 16)):
            sys.exit(0)
        received += chunk

    task = loads(received)
    calls = {
        name: Call(
            c["target"],
            tuple(c["arguments"]),
        )
        for name, c in task["calls"].items()
    }
    # What all calls import is imported once.
    for module in {call.target.partition(":")[0] for call in calls.values()}:
        with suppress(Exception):  # the call says why, in its child
            import_module(module)
    _be_supervisor(
        _Task(calls, task["limit_s"], task["parallel"]),
        control,
        answers,
    )


@dataclass(eq=False)
class _Child:
    name: str
    pid: int
    answer: int
    output: int
    deadline: float
    memory: int
    code: int | None = None
    received: bytearray = field(default_factory=bytearray)
    tail: bytes = b""

    def has_ended(self) -> bool:
        """Tell whether the child has ended, with all that it said read."""
        if self.code is None:
            with suppress(ChildProcessError):
                pid, status = os.waitpid(
                    self.pid,
                    os.WNOHANG,
                )
                self.code = os.waitstatus_to_exitcode(status) if pid else None
        if self.code is not None:
            while self.take(self.answer) or self.take(self.output):
                pass
        return self.code is not None

    def take(self, pipe: int) -> bool:
        """Read what a pipe has, and tell whether that was anything."""
        try:
            chunk = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return False
        if pipe == self.answer:
            self.received += chunk
        else:
            self.tail = (self.tail + chunk)[-TAIL_BYTES:]
        return bool(chunk) and len(self.received) <= MAX_ANSWER_BYTES

    def end(self) -> None:
        """Kill the child with its group."""
        os.close(self.answer)
        os.close(self.output)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)


def _supervise(
    task: _Task,
    control: int,
    answers: int,
) -> None:
    """Start children, write an answer for each, and end when the caller is gone."""
    adopt_orphans()
    waiting, running = list(task.calls), list[_Child]()
    selector = DefaultSelector()
    selector.register(control, EVENT_READ)

    try:
        while waiting or running:
            while waiting and len(running) < task.parallel:
                name = waiting.pop(0)
                running.append(
                    _start(
                        name,
                        task.calls[name],
                        task.limit_s,
                        (control, answers),
                    )
                )
                for pipe in (running[-1].answer, running[-1].output):
                    selector.register(
                        pipe,
                        EVENT_READ,
                        running[-1],
                    )

            for key, _ in selector.select(LOOK_S):
                if key.data is None:
                    return
                if not key.data.take(key.fd):
                    selector.unregister(key.fd)
            for child, answer in [(child, _answer(child)) for child in running]:
                if answer is None:
                    continue
                running.remove(child)
                for pipe in (child.answer, child.output):
                    with suppress(KeyError):
                        selector.unregister(pipe)
                child.end()
                kill_children(keep=[other.pid for other in running])
                write_line(
                    answers,
                    dumps({"name": child.name, **asdict(answer)}),
                )
    finally:
        for child in running:
            child.end()
        kill_children()


def _answer(child: _Child) -> Answer | None:
    """Return the answer of a child that is done."""
    ended = child.has_ended()
    if child.received.endswith(b"\n") or len(child.received) > MAX_ANSWER_BYTES:
        return _parsed(bytes(child.received))
    if ended:
        return Answer(
            error=ending(
                child.code or 0,
                child.tail,
            )
        )
    below = list(children(child.pid))
    late = time.monotonic() - child.deadline
    if late > 0 and late > max(map(queued_seconds, below), default=0.0):
        return Answer(error="it takes too long", hung=True)
    held = sum(map(resident_bytes, below))
    if held > child.memory + MAX_MEMORY_BYTES:
        return Answer(error=f"it takes more than {MAX_MEMORY_BYTES >> 30} GiB of memory")
    return None


def _parsed(received: bytes) -> Answer:
    """Read what a child says. Whoever found the pipe may have written other things."""
    try:
        said = loads(received)
        value, error, files = said["value"], said["error"], said["files"]
        assert isinstance(
            error,
            str,
        ) and all(isinstance(file, str) for file in files)
        return Answer(value, shortened(error), tuple(files))
    except (ValueError, KeyError, TypeError, AssertionError, RecursionError):
        return Answer(error="its answer is damaged or too long")


def _start(
    name: str,
    call: Call,
    limit_s: float,
    private: tuple[int, ...],
) -> _Child:
    answer, write = os.pipe()
    output, printed = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            for pipe in (*private, answer, output):
                os.close(pipe)
            shield(write, printed)
            be_child(call, write, printed)
        finally:
            os._exit(1)

    for pipe in (write, printed):
        os.close(pipe)
    for pipe in (answer, output):
        os.set_blocking(pipe, False)
    return _Child(
        name,
        pid,
        answer,
        output,
        time.monotonic() + limit_s,
        resident_bytes(),
    )
