"""Keep one interpreter: part it from the others, bound its memory, say how it ended.

Three processes belong to an interpreter. The keeper stands outside of the world that
the program sees. The first process of that world ends it, and the second one runs the
program. When the host closes its end of ``life``, all three end. Between two calls of
an episode the program is stopped, with all that it left running.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import signal
import socket
import stat
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from coupler_agents.inside import program, walls
from coupler_agents.inside.bounds import Bounds

TICK_MS = 500
FOLDER = "/tmp"  # noqa: S108
FAILED = 126
# The host's words: stop what is left running between two calls, and let it go on.
STOP = b"s"
CHUNK = 64
# A stopped process forks no more, and so few passes find them all.
PASSES = 20
# Bytes of all files that are handed out.
MAX_FETCHED = 8 << 20


@dataclass(frozen=True, slots=True)
class Terms:
    """Hold what all interpreters of a sandbox have in common.

    Attributes:
        mapped: bytes of address space of the parent.
        separate: whether each interpreter has namespaces of its own.
    """

    bounds: Bounds
    mapped: int
    separate: bool


def keep(life: socket.socket, others: list[int], fetch: list[str], terms: Terms) -> None:
    """Start an interpreter, and report its end to the host.

    Args:
        others: the descriptors for requests, output and errors of the interpreter.
        fetch: names of files that the host wants when it has ended.
    """
    ending: dict[str, Any]
    try:
        walls.end_with_parent()
        processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        if terms.separate:
            walls.separate(terms.bounds)
        os.chdir(FOLDER)
        first = os.fork()
        if not first:
            _begin(others, terms)
        for descriptor in others:
            os.close(descriptor)
        ending = _watch(life, first, processes, terms.bounds.memory)
    except OSError as error:
        ending = {"failed": str(error)}

    ending["files"] = fetched(fetch)
    try:
        life.sendall(json.dumps(ending).encode())
    except OSError:
        return


def _watch(life: socket.socket, first: int, processes: int, memory: int) -> dict[str, Any]:
    """Wait for the end of an interpreter, and return how it ended."""
    poller = select.poll()
    end = os.pidfd_open(first)
    for descriptor in (life.fileno(), end):
        poller.register(descriptor, select.POLLIN)

    how = ""
    while not how:
        ready = {descriptor for descriptor, _ in poller.poll(TICK_MS)}
        if end in ready:
            break
        if life.fileno() in ready:
            asked = life.recv(CHUNK)
            how = "" if asked else "was ended"
            if asked:
                stops = asked.endswith(STOP)
                signal_below(
                    first,
                    processes,
                    signal.SIGSTOP if stops else signal.SIGCONT,
                )
        elif (used := memory_of(first, processes)) > memory:
            how = f"used {used / 2**30:.2f} GiB of memory"

    if how:
        os.kill(first, signal.SIGKILL)
    return {"how": how, "code": exit_code(os.waitpid(first, 0)[1])}


def exit_code(status: int) -> int:
    """Return the exit code of a process, or 128 and the signal that killed it."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def memory_of(root: int, processes: int) -> int:
    """Return the bytes of memory that a process and its descendants use.

    Args:
        processes: a descriptor of ``/proc``.
    """
    pages = 0
    for pid in below(root, processes):
        # One may have ended meanwhile.
        with suppress(OSError, IndexError):
            pages += int(_content(f"{pid}/statm", processes).split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def signal_below(root: int, processes: int, number: int) -> None:
    """Send a signal to all descendants of a process, those among them that are new."""
    reached: set[int] = set()
    for _ in range(PASSES):
        found = set(below(root, processes)) - {root}
        if found <= reached:
            return
        for pid in found:
            with suppress(OSError):
                os.kill(pid, number)
        reached |= found


def below(root: int, processes: int) -> list[int]:
    """Return a process and all that descends from it, by their numbers."""
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        with suppress(OSError):
            for task in _names(f"{pid}/task", processes):
                children = _content(f"{pid}/task/{task}/children", processes)
                waiting += map(int, children.split())
    return found


def fetched(names: list[str]) -> dict[str, str]:
    """Read files that a program left, as base64. What is no file is left out."""
    found: dict[str, str] = {}
    left = MAX_FETCHED

    for name in names:
        try:
            # A pipe, which nobody writes to, must not be waited for.
            descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except (OSError, ValueError):
            continue
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            continue
        with open(descriptor, "rb") as file:
            data = file.read(left + 1)
        left -= len(data)
        if left < 0:
            break
        found[name] = base64.b64encode(data).decode()
    return found


def _begin(others: list[int], terms: Terms) -> NoReturn:
    """Be the first process of a world, with the program as its child."""
    try:
        walls.end_with_parent()
        walls.confine(
            terms.bounds,
            terms.mapped,
            2 if terms.separate else 4,
        )
        child = os.fork()
        if not child:
            _play(others)
        walls.hide()
        os.closerange(0, walls.DESCRIPTORS)

        ended, status = os.wait()
        while ended != child:
            ended, status = os.wait()
        os._exit(exit_code(status))
    finally:
        os._exit(FAILED)


def _play(others: list[int]) -> NoReturn:
    """Be the process that runs the program."""
    try:
        os.setsid()
        _claim(others)
        read = program.reader()
        request = read()
        for name, text in (request.get("files") or {}).items():
            folder = os.path.dirname(name)
            if folder:
                os.makedirs(folder, exist_ok=True)
            with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
                file.write(text)

        if request.get("script"):
            os.close(program.TALK)
            _give_stdin(str(request.get("stdin") or ""))
            os._exit(program.run(request))
        program.play(request, read)
    finally:
        os._exit(FAILED)


def _claim(others: list[int]) -> None:
    """Put descriptors where the program expects them, and close the rest."""
    talk, out, err = (fcntl.fcntl(number, fcntl.F_DUPFD, 100) for number in others)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, wanted in ((nothing, 0), (out, 1), (err, 2), (talk, program.TALK)):
        os.dup2(number, wanted)
    os.closerange(program.TALK + 1, walls.DESCRIPTORS)


def _give_stdin(text: str) -> None:
    file = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR)
    with open(file, "wb", closefd=False) as writer:
        writer.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(file, 0, os.SEEK_SET)
    os.dup2(file, 0)
    os.close(file)
    # It lives as long as the process.
    sys.stdin = open(  # noqa: SIM115
        0, encoding="utf-8", errors="surrogateescape", closefd=False
    )


def _content(name: str, folder: int) -> bytes:
    descriptor = os.open(name, os.O_RDONLY, dir_fd=folder)
    with open(descriptor, "rb") as file:
        return file.read()


def _names(name: str, folder: int) -> list[str]:
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
    try:
        return os.listdir(descriptor)
    finally:
        os.close(descriptor)
