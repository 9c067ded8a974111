"""Make one call in a process that was forked for it."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from json import dumps
from typing import Any, NoReturn

from coupler.system.imports import resolve
from coupler.system.reaping import die_with_parent

MAX_SENTENCE = 300


@dataclass(frozen=True, slots=True)
class Call:
    """Call is one function with its arguments, which JSON can write.

    Attributes:
        target: ``"package.module:function"``.
    """

    target: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer is the value of a call, which JSON can write, or why it has none.

    Attributes:
        files: those of the modules that the call imported.
        hung: the call was stopped at its limit.
    """

    value: Any = None
    error: str = ""
    files: tuple[str, ...] = ()
    hung: bool = False


def shortened(text: str) -> str:
    """Return the first line of a text that anybody may have written, made printable."""
    first = next((line for line in text[: 4 * MAX_SENTENCE].splitlines() if line.strip()), "")
    return "".join(c if c.isprintable() else "?" for c in first.strip())[:MAX_SENTENCE]


def ending(code: int, tail: bytes) -> str:
    """Say how a process ended that gave no answer."""
    printed = tail.decode(errors="replace").strip().splitlines()
    end = f", and printed last: {printed[-1]}" if printed else ""
    if code < 0:
        with suppress(ValueError):
            return shortened(f"it was killed by {signal.Signals(-code).name}{end}")
    return shortened(f"it exited with code {code}{end}")


def write_line(pipe: int, line: str) -> None:
    data = memoryview(line.encode() + b"\n")
    while data:
        data = data[os.write(pipe, data) :]


def shield(*pipes: int) -> None:
    """Fork, so that the call kills this process where it kills its parent.

    This process ends as the call does. The call goes on in the child.
    """
    import resource  # Windows has none

    os.setsid()
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pid = os.fork()
    if not pid:
        die_with_parent()
        return

    for pipe in pipes:
        os.close(pipe)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def be_child(
    call: Call,
    answer: int,
    printed: int,
) -> NoReturn:
    """Call the function, and write its answer to a pipe that nobody knows of."""
    # It may write to a file of the caller.
    faulthandler.disable()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for standard, pipe in ((0, nothing), (1, printed), (2, printed)):
        os.dup2(pipe, standard)
    os.close(nothing)
    os.close(printed)
    # Nobody closes them, as nobody closes those of an interpreter.
    sys.stdin = sys.__stdin__ = os.fdopen(
        0,
        closefd=False,
    )  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = os.fdopen(
        1,
        "w",
        closefd=False,
    )  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(
        2,
        "w",
        closefd=False,
    )  # type: ignore[misc]

    # Its own module counts, whoever imported that before the fork.
    before = set(sys.modules) - {call.target.partition(":")[0]}
    write, leave = write_line, os._exit
    value, error = None, ""
    try:
        value = resolve(call.target)(*call.arguments)
        dumps(value)
    except BaseException as raised:
        value, error = None, _text(raised)

    write(
        answer,
        dumps({"value": value, "error": error, "files": _imported(before)}),
    )
    leave(0)


def _text(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException as worse:
        text = f"{type(error).__name__}, whose text raises {type(worse).__name__}"
    return text[: 4 * MAX_SENTENCE]


def _imported(before: Collection[str]) -> list[str]:
    """Return the files of modules that were imported since."""
    try:
        new = [module for name, module in list(sys.modules.items()) if name not in before]
        files = [
            getattr(
                module,
                "__file__",
                None,
            )
            for module in new
        ]
        return sorted(
            {
                str.__str__(file)
                for file in files
                if isinstance(
                    file,
                    str,
                )
            }
        )
    except BaseException:
        return []
