"""Call a reward function: ``python -m coupler.rewards.worker TARGET MODE OPINION...``.

The process reads a token from stdin, and then lines of JSON ``[[[completion, ...],
answer, row], ...]``. It writes one line ``TOKEN NUMBER [results, seconds, traceback]``
to stdout for each call, in order, as soon as it is known. A result, one for each
completion, is ``[number or null, reason, answer or null, parts]``. The first line is
``TOKEN 0 {"sandbox": bool, "group": bool}`` or ``TOKEN 0 {"failed": why}``, and numbers
start anew after it.

The function sees neither pipe: its stdin is empty, and its stdout is stderr. A class is
created once, before the first call, and its ``__call__`` is the function. Code that
loads slowly belongs into its ``__init__``. What has an attribute ``sandbox = True``
asks for the sandbox, unless MODE is ``off``. With MODE ``seccomp``, the process
confines itself before the first call. Each OPINION is a column of every row, which is
passed by its keyword, too.
"""

from __future__ import annotations

import faulthandler
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, BinaryIO

from coupler.errors import CouplerError
from coupler.rewards.result import Invalid
from coupler.rewards.seccomp import confine
from coupler.rewards.value import Checked, checked, each, name, said
from coupler.system import imports
from coupler.system.imports import resolve

# A function takes one completion, or all of a prompt at once.
COMPLETIONS = ("completion", "completions")
KEYWORDS = (*COMPLETIONS, "answer", "row", "prompt")
# What models say of an episode before the call, and the option that asks for it.
OPINIONS = {"score": "reward_model.model.path", "verdict": "judge.model.path"}
MAX_REASON, MAX_TRACE = 300, 16_384


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


def main(target: str, mode: str, *opinions: str) -> None:
    """Serve calls until stdin ends."""
    requests, pipe = _claim_pipes()
    send = _Answers(pipe, requests.readline().strip()).send

    try:
        function = resolve(target)
        wanted = mode != "off" and getattr(function, "sandbox", False) is True
        if wanted and mode == "ask":
            return send(0, {"sandbox": True, "group": False})
        if isinstance(function, type):
            function = function()
        keywords = accepted_keywords(function, target, opinions)
    except CouplerError as error:
        return send(0, {"failed": f"reward.target={target} cannot be used: {error}"})
    # The module is the user's, and whatever its import raises is the answer.
    except BaseException as error:
        what = (
            f"reward.target={target} cannot be imported: {said(partial(_told, error), MAX_REASON)}."
        )
        return send(0, {"failed": "\n".join([what, *_frames(error)])})

    try:
        if mode == "seccomp":
            confine()
    except OSError as error:
        return send(0, {"failed": f"the sandbox of the reward {target} cannot be made: {error}"})

    send(0, {"sandbox": wanted, "group": "completions" in keywords})
    _serve(function, keywords, requests, send, json.JSONDecoder().decode)


def _serve(
    function: Callable[..., Any],
    keywords: tuple[str, ...],
    requests: BinaryIO,
    send: Callable[[int, Any], None],
    decode: Callable[[str], Any],
) -> None:
    number = 0

    while line := _next(requests):
        for texts, answer, row in decode(line.decode()):
            given = {
                "completion": texts[0],
                "completions": texts,
                "answer": answer,
                "row": row,
                "prompt": row.get("prompt"),
                **{name: row.get(name) for name in OPINIONS},
            }
            send(number, _call(function, {name: given[name] for name in keywords}, len(texts)))
            number += 1


def _next(requests: BinaryIO) -> bytes:
    # The function may have found the pipe, and made it one that does not wait.
    os.set_blocking(requests.fileno(), True)
    return requests.readline()


def accepted_keywords(function: Any, target: str, opinions: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the keywords among ``KEYWORDS`` and ``opinions`` that ``function`` takes.

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
    names, known = {p.name for p in named}, (*KEYWORDS, *opinions)
    keywords = tuple(k for k in known if anything or k in names)
    if anything and "completions" not in names:
        keywords = tuple(k for k in keywords if k != "completions")

    extra = sorted(required - set(keywords))
    problems = [f"requires {', '.join(extra)}, which nothing passes"] if extra else []
    if not set(keywords) & set(COMPLETIONS):
        problems.append("does not take completion or completions")
    if names.issuperset(COMPLETIONS):
        problems.append("takes both completion and completions")
    if problems:
        lacks = [f"{name} comes with {OPINIONS[name]}" for name in OPINIONS if name in extra]
        absent = "".join(f"\n  try:  {text}" for text in lacks)
        raise CouplerError(
            f"the reward {target}{inspect.signature(function)} {' and '.join(problems)}.\n"
            f"  it is called with the keywords it takes among:  {', '.join(known)}{absent}"
        )
    return keywords


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


def _call(
    function: Callable[..., Any],
    keywords: dict[str, Any],
    size: int,
    clock: Callable[[], float] = perf_counter,
) -> tuple[list[Checked], float, str]:
    start, trace = clock(), ""
    try:
        value = function(**keywords)
        found = each(value, size) if "completions" in keywords else [checked(value)]
    # The code is the user's: any exception, even SystemExit, is an invalid reward.
    except BaseException as error:
        found = [checked(Invalid(said(partial(_told, error), MAX_REASON)))] * size
        trace = said(partial(_trace, error), MAX_TRACE)

    return found, clock() - start, trace


def _told(error: BaseException) -> str:
    return f"{name(type(error))}: {error}"


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
    main(*sys.argv[1:])
