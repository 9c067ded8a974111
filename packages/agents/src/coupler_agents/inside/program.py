"""Run what a model wrote. This is the one file that turns text into code.

It runs in the sandbox alone: in a fork of :mod:`coupler_agents.inside.__main__` that
has no rights, no network and no files of the user. What it sends is text, which nothing
outside evaluates.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import json
import linecache
import os
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from types import CodeType, ModuleType
from typing import Any

TALK = 3
HEADER = struct.Struct(">I")
SHOWN = 16_384
SURROGATES = "backslashreplace"


def play(request: Mapping[str, Any], read: Callable[[], Any]) -> None:
    """Run the calls of an episode in one namespace, until there are no more.

    A call is ``{"code": text}``. Its answer is ``{"number", "value", "error"}``: the
    value of a last expression, and the traceback, each as text or empty.
    """
    sys.stdout = sys.stderr = _stream(1, line_buffering=True)
    space = _main()
    send, owner, getpid, leave = _sender(), os.getpid(), os.getpid, os._exit
    flush, short, number = _flush, _short, 0

    while True:
        name = f"<call {number + 1}>"
        value, error = _call(str(request["code"]), name, space)
        # A child that the program forked, and that came back, has nothing to say.
        if getpid() != owner:
            leave(0)
        flush()
        send({"number": number, "value": short(value), "error": short(error)})
        number += 1
        request = read()


def run(request: Mapping[str, Any]) -> int:
    """Run one program to its end, as ``python program.py`` would.

    Returns its exit code.
    """
    sys.stdout, sys.stderr = _stream(1), _stream(2, line_buffering=True)
    sys.argv = ["program.py"]
    space, owner = _main(), os.getpid()

    code = 0
    try:
        exec(_compiled(str(request["code"]), "program.py", "exec"), space)  # noqa: S102
    except SystemExit as error:
        code = _exit_code(error)
    # Whatever a program raises is its end.
    except BaseException as error:
        code = 1
        os.write(2, _told(error).encode(errors=SURROGATES))
    _finish()
    return code if os.getpid() == owner else 0


def _call(text: str, name: str, space: dict[str, Any]) -> tuple[str, str]:
    """Run one call. Returns the value of its last expression, and its traceback."""
    try:
        _remember(text, name)
        tree: Any = compile(text, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None

        exec(_compiled(tree, name, "exec"), space)  # noqa: S102
        if not isinstance(last, ast.Expr):
            return "", ""
        value = eval(_compiled(ast.Expression(last.value), name, "eval"), space)  # noqa: S307
        return "" if value is None else repr(value), ""
    # Whatever a program raises is shown to the policy.
    except BaseException as error:
        return "", _told(error)


def _compiled(source: Any, name: str, mode: str) -> CodeType:
    if isinstance(source, str):
        _remember(source, name)
    return compile(source, name, mode, dont_inherit=True)


def _remember(text: str, name: str) -> None:
    """Let tracebacks show the lines of a program."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def _told(error: BaseException) -> str:
    """Format a traceback without the frames of this file."""
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    try:
        return "".join(traceback.format_exception(error.with_traceback(frames)))
    # An exception of the program's own may fail to describe itself.
    except BaseException:
        return f"{type(error).__name__}\n"


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    os.write(2, f"{error.code}\n".encode(errors=SURROGATES))
    return 1


def _finish() -> None:
    """Wait for threads, and call what the program wants called at its end."""
    for step in (threading._shutdown, atexit._run_exitfuncs, _flush):  # type: ignore[attr-defined]
        try:
            step()
        except BaseException as error:
            os.write(2, _told(error).encode(errors=SURROGATES))


def _main() -> dict[str, Any]:
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    return module.__dict__


def _stream(descriptor: int, *, line_buffering: bool = False) -> Any:
    # It lives as long as the process.
    stream = open(  # noqa: SIM115
        descriptor, "w", encoding="utf-8", errors=SURROGATES, closefd=False
    )
    stream.reconfigure(line_buffering=line_buffering)
    return stream


def _flush() -> None:
    # A program may have put anything in their place.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()


def _short(text: str) -> str:
    """Leave out the middle of a long text."""
    if len(text) <= SHOWN:
        return text
    half = SHOWN // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters) ...\n{text[-half:]}"


def _sender() -> Callable[[Any], None]:
    """Return what sends an answer, by functions that a program cannot replace."""
    encode, write, pack = json.JSONEncoder().encode, os.write, HEADER.pack

    def send(answer: Any) -> None:
        data = encode(answer).encode()
        data = pack(len(data)) + data
        while data:
            data = data[write(TALK, data) :]

    return send


def reader() -> Callable[[], Any]:
    """Return what waits for a request. It ends the process when there are no more."""
    decode, read, unpack, leave = json.JSONDecoder().decode, os.read, HEADER.unpack, os._exit

    def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = read(TALK, min(size - len(data), 1 << 16))
            if not chunk:
                leave(0)
            data += chunk
        return data

    def receive() -> Any:
        (size,) = unpack(exactly(4))
        return decode(exactly(size).decode())

    return receive
