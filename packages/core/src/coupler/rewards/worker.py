"""Call a reward function in a process: ``python -m coupler.rewards.worker TARGET``.

The process reads lines of JSON ``[[completion, answer, row], ...]`` from stdin. It
writes one line ``[number or null, reason, seconds, traceback, answer or null]`` to
stdout for each call, in order, as soon as its result is known. The first line is
``{"ready": true}`` or ``{"failed": why}``.

The function sees neither pipe: its stdin is empty, and its stdout is stderr. A class is
created once, before the first call, and its ``__call__`` is the function. Code that
loads slowly belongs into its ``__init__``.
"""

from __future__ import annotations

import ctypes
import faulthandler
import inspect
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO, SupportsFloat

from coupler.errors import CouplerError
from coupler.rewards.result import Graded, Invalid
from coupler.system import imports
from coupler.system.imports import resolve

KEYWORDS = ("completion", "answer", "row", "prompt")
PR_SET_PDEATHSIG = 1


def main(target: str) -> None:
    """Serve calls until stdin ends."""
    requests, answers = _claim_pipes()

    def send(message: Any) -> None:
        answers.write(json.dumps(message).encode() + b"\n")
        answers.flush()

    try:
        function = resolve(target)
        if isinstance(function, type):
            function = function()
        keywords = accepted_keywords(function, target)
    except CouplerError as error:
        return send({"failed": f"reward.target={target} cannot be used: {error}"})
    # The module is the user's, and whatever its import raises is the answer.
    except BaseException as error:
        what = f"reward.target={target} cannot be imported: {type(error).__name__}: {error}."
        return send({"failed": "\n".join([what, *_frames(error)])})

    send({"ready": True})
    for line in requests:
        for completion, answer, row in json.loads(line):
            given = {
                "completion": completion,
                "answer": answer,
                "row": row,
                "prompt": row.get("prompt"),
            }
            send(_call(function, {name: given[name] for name in keywords}))


def accepted_keywords(function: Any, target: str) -> tuple[str, ...]:
    """Return the keywords among ``KEYWORDS`` that ``function`` takes.

    Raises:
        CouplerError: it is no plain function, does not take ``completion``, or requires
            an argument that nothing passes.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise CouplerError(
            f"the reward {target} is a {type(function).__name__}, not a function."
        ) from None
    if inspect.iscoroutinefunction(function):
        raise CouplerError(
            f"the reward {target} is async.\n  try:  a plain function; it has a process of its own"
        )

    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    required = {
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    keywords = tuple(k for k in KEYWORDS if anything or any(p.name == k for p in named))

    extra = sorted(required - set(keywords))
    problems = [f"requires {', '.join(extra)}, which nothing passes"] if extra else []
    if "completion" not in keywords:
        problems.append("does not take completion")
    if problems:
        raise CouplerError(
            f"the reward {target}{inspect.signature(function)} {' and '.join(problems)}.\n"
            f"  it is called with the keywords it takes among:  {', '.join(KEYWORDS)}"
        )
    return keywords


def _claim_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Take the protocol's pipes away from the function.

    Also makes this process die with the thread that started it.
    """
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")

    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    faulthandler.enable()
    # The pool sends this signal to learn where a call hangs.
    faulthandler.register(signal.SIGUSR1)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return requests, answers


def _call(
    function: Callable[..., Any], keywords: dict[str, Any]
) -> tuple[float | None, str, float, str, str | None]:
    start, answer, trace = time.perf_counter(), None, ""
    try:
        value = function(**keywords)
        number, reason = _number(value)
        answer = str(value.answer) if isinstance(value, Graded) else None
    # The code is the user's: any exception, even SystemExit, is an invalid reward.
    except BaseException as error:
        number, reason, trace = None, f"{type(error).__name__}: {error}"[:200], _trace(error)

    return number, reason, time.perf_counter() - start, trace, answer


def _number(value: Any) -> tuple[float | None, str]:
    if isinstance(value, Invalid):
        return None, value.reason
    if not isinstance(value, SupportsFloat):
        return None, f"returned a {type(value).__name__}, not a number"
    number = float(value)
    return (number, "") if math.isfinite(number) else (None, f"returned {number}")


def _frames(error: BaseException) -> list[str]:
    """Return the frames of the user's module in the traceback of ``error``.

    The frames of the import machinery are left out.
    """
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [
        f
        for f in frames
        if "importlib" not in f.filename and f.filename not in (__file__, imports.__file__)
    ]
    return [f"  at:  {f.filename}, line {f.lineno}, in {f.name}" for f in theirs]


def _trace(error: BaseException) -> str:
    """Format the traceback without the frame of this file."""
    inner = error.__traceback__.tb_next if error.__traceback__ else None
    return "".join(traceback.format_exception(error.with_traceback(inner)))


if __name__ == "__main__":
    main(sys.argv[1])
