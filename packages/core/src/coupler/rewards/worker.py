"""Call a reward function: ``python -m coupler.rewards.worker TARGET MODE OPINION...``.

The process reads a token from stdin, a line of JSON with the fields of
:class:`~coupler.rewards.process.Calling`, and then lines of JSON ``[[[completion, ...],
answer, row], ...]``. It writes one line ``TOKEN NUMBER [results, seconds, traceback]``
to stdout for each call, in order. A result, one for each completion, is ``[number or
null, reason, answer or null, parts]``. The first line is ``TOKEN 0 {"sandbox": bool,
...}`` with what :meth:`Signature.__init__` found, or ``TOKEN 0 {"failed": why}``, and
numbers start anew after it.

The function sees neither pipe: its stdin is empty, and its stdout is stderr. A class is
created once, before the first call, and its ``__call__`` is the function. Code that
loads slowly belongs into its ``__init__``. What has an attribute ``sandbox = True``
asks for the sandbox, unless MODE is ``off``. With MODE ``seccomp``, the process
confines itself before the first call. Each OPINION is a column of every row, which is
passed by its keyword, too. The calls of one line go to an async function side by side,
and to one that takes several prompts together.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any, BinaryIO

from coupler.errors import CouplerError
from coupler.rewards import signatures
from coupler.rewards.result import Invalid
from coupler.rewards.seccomp import confine
from coupler.rewards.signatures import Call, Signature
from coupler.rewards.value import Checked, checked, name, said
from coupler.system import imports
from coupler.system.imports import resolve

MAX_REASON, MAX_TRACE = 300, 16_384

# Their frames are left out of tracebacks.
OURS = (__file__, imports.__file__, signatures.__file__)
# results of a call, its seconds, and the traceback of what it raised
Answer = tuple[list[Checked], float, str]


class Late(Exception):
    """Raised where an async call took too long."""


class _Answers:
    """Write answers, by functions that are kept here: a reward may replace any."""

    def __init__(self, pipe: int, token: bytes) -> None:
        dumps, write, getpid, leave = json.JSONEncoder().encode, os.write, os.getpid, os._exit
        owner = getpid()

        def send(number: int, message: Any) -> None:
            # A child that the function forked, and that returned, has nothing to say.
            if getpid() != owner:
                leave(0)
            line = b"%s %d %s\n" % (token, number, dumps(message).encode())
            while line:
                line = line[write(pipe, line) :]

        self.send = send


class _Caller:
    """Call a function, and answer for whatever it returns or raises."""

    def __init__(self, signature: Signature, timeout_s: float) -> None:
        self.signature, self.timeout_s = signature, timeout_s
        self.clock = perf_counter
        # Made before the sandbox, in which a loop cannot open its pipe.
        self.runner = asyncio.Runner() if signature.is_async else None
        if self.runner:
            self.runner.get_loop()

    def answers(self, calls: Sequence[Call]) -> Iterator[Answer]:
        """Yield the answer to each of the calls that came together."""
        if self.signature.takes_batch:
            yield from self._together(calls)
        elif self.runner:
            yield from self.runner.run(self._side_by_side(calls))
        else:
            yield from map(self._one, calls)

    def _together(self, calls: Sequence[Call]) -> Iterator[Answer]:
        found, seconds, trace = self._one(*calls)
        # One bad row is not to cost the others.
        if trace and len(calls) > 1:
            yield from map(self._one, calls)
            return
        for texts, _, _ in calls:
            yield found[: len(texts)], seconds, trace
            found = found[len(texts) :]

    def _one(self, *calls: Call) -> Answer:
        if self.runner:
            return self.runner.run(self._awaited(*calls))
        start = self.clock()

        try:
            return self.signature.read(self.signature.call(calls), calls), self.clock() - start, ""
        # The code is the user's: any exception, even SystemExit, is an invalid reward.
        except BaseException as error:
            return _failed(calls, error, self.clock() - start)

    async def _side_by_side(self, calls: Sequence[Call]) -> list[Answer]:
        return await asyncio.gather(*map(self._awaited, calls))

    async def _awaited(self, *calls: Call) -> Answer:
        start, limit = self.clock(), asyncio.timeout(self.timeout_s)

        try:
            async with limit:
                value = await self.signature.call(calls)
            return self.signature.read(value, calls), self.clock() - start, ""
        except BaseException as error:
            late = Late(f"took longer than {self.timeout_s:g} s")
            return _failed(calls, late if limit.expired() else error, self.clock() - start)


def main(target: str, mode: str, *opinions: str) -> None:
    """Serve calls until stdin ends."""
    requests, pipe = _claim_pipes()
    send = _Answers(pipe, requests.readline().strip()).send
    calling = json.loads(requests.readline())
    key = f"{calling['key']}={target}"

    try:
        function = resolve(target)
        wanted = mode != "off" and getattr(function, "sandbox", False) is True
        if wanted and mode == "ask":
            return send(0, {"sandbox": True})
        signature = Signature(function, target, opinions, calling["args"])
        caller = _Caller(signature, calling["timeout_s"])
    except CouplerError as error:
        return send(0, {"failed": f"{key} cannot be used: {error}"})
    # The module is the user's, and whatever its import raises is the answer.
    except BaseException as error:
        what = f"{key} cannot be imported: {said(partial(_told, error), MAX_REASON)}."
        return send(0, {"failed": "\n".join([what, *_frames(error)])})

    try:
        if mode == "seccomp":
            confine()
    except OSError as error:
        return send(0, {"failed": f"the sandbox of the reward {target} cannot be made: {error}"})

    send(0, {"sandbox": wanted, **signature.facts()})
    _serve(caller, requests, send, json.JSONDecoder().decode)


def _serve(
    caller: _Caller,
    requests: BinaryIO,
    send: Callable[[int, Any], None],
    decode: Callable[[str], Any],
) -> None:
    number = 0

    while line := _next(requests):
        for answer in caller.answers(decode(line.decode())):
            send(number, answer)
            number += 1


def _next(requests: BinaryIO) -> bytes:
    # The function may have found the pipe, and made it one that does not wait.
    os.set_blocking(requests.fileno(), True)
    return requests.readline()


def _claim_pipes() -> tuple[BinaryIO, int]:
    """Take the protocol's pipes away from the function."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.dup(1)

    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    faulthandler.enable()
    # The pool sends this signal to learn where a call hangs.
    faulthandler.register(signal.SIGUSR1)
    return requests, answers


def _failed(calls: Sequence[Call], error: BaseException, seconds: float) -> Answer:
    """Answer for calls that raised."""
    size = sum(len(texts) for texts, _, _ in calls)
    if isinstance(error, Late):
        return [checked(Invalid(str(error)))] * size, seconds, ""
    reason = said(partial(_told, error), MAX_REASON)
    return [checked(Invalid(reason))] * size, seconds, said(partial(_trace, error), MAX_TRACE)


def _told(error: BaseException) -> str:
    return f"{name(type(error))}: {error}"


def _frames(error: BaseException) -> list[str]:
    """Return the frames of the user's module in the traceback of ``error``.

    The frames of the import machinery are left out.
    """
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if "importlib" not in f.filename and f.filename not in OURS]
    return [f"  at:  {f.filename}, line {f.lineno}, in {f.name}" for f in theirs]


def _trace(error: BaseException) -> str:
    """Format the traceback without the frames of Coupler that it begins with."""
    inner = error.__traceback__
    while inner and inner.tb_frame.f_code.co_filename in OURS:
        inner = inner.tb_next
    return "".join(traceback.format_exception(error.with_traceback(inner)))


if __name__ == "__main__":
    main(*sys.argv[1:])
