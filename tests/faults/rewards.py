"""Reward functions that print, write, allocate, fork, lie, hang, kill and die.

Each case is a function of a statement or value from ``hostile`` with its parameters,
done in one of several ways: at once, in a thread, in a child that has a session of its
own, while the result is read, at import. It scores beside honest calls of the same
process. A case comes through if an honest call gets another result, if the trainer's
memory or what it prints grows, if it takes longer than its limit and some seconds, if a
process or a file is left, or if anything but a result or a sentence comes out.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.faults import hostile, run
from tests.faults.toy_runs import arguments, call, write_inputs

from coupler.errors import CouplerError
from coupler.rewards import Invalid, Limits, RewardPool, process
from coupler.rewards.result import Scored
from coupler.system.process_memory import resident_bytes

TIMEOUT_S = 1.5
# What a slow machine needs to start a process again, three times.
SLACK_S = 20.0
LIMITS = Limits(sandbox="off", max_memory_gib=0.5, max_processes=150)
MOST_MEMORY, MOST_OUTPUT = 200 << 20, 8 << 20
MOST_TEXT = 300_000
HONEST = 12
# These hold the interpreter's lock, or stop a process that is not theirs: a call that
# runs meanwhile cannot be told from one that hangs.
HANG_ALL = ("PyDLL", "9 ** 9", "re.match", "SIGSTOP", "setswitchinterval", "while_true")


@dataclass(frozen=True, slots=True)
class Case:
    """One hostile reward."""

    way: str
    deed: str
    becomes: str

    def source(self, sleep: str) -> str:
        """Return the module, whose ``score`` is hostile to the completion ``evil``."""
        head = [hostile.HEADER.replace("SLEEP", repr(sleep)), f"code = {self.deed!r}"]
        evil = f"return {self.deed}"
        if self.way == "at import":
            head.append(self.deed)
            evil = "return 0.5"
        elif self.way != "returned":
            evil = hostile.WAYS[self.way].replace("DEED", self.deed)
        return "\n".join(
            [
                *head,
                "def score(completion, row):",
                "    if completion == 'evil':",
                f"        {evil}",
                "        return 0.5",
                "    return float(completion)",
            ]
        )

    def __str__(self) -> str:
        return f"{self.way}: {self.deed}"


def cases(stream: random.Random, number: int) -> Iterator[Case]:
    """Draw distinct cases."""
    drawn = set[Case]()
    while len(drawn) < number:
        case = _draw(stream)
        if case not in drawn:
            drawn.add(case)
            yield case


def _draw(stream: random.Random) -> Case:
    if stream.random() < 0.35:
        text, becomes = stream.choice(hostile.VALUES)
        return Case("returned", _filled(stream, text), becomes)
    text, becomes = stream.choice(hostile.DEEDS)
    way = stream.choice(["at once"] * 5 + [*hostile.WAYS, "at import"])
    if "thread" in way and any(word in text for word in HANG_ALL):
        way = "at once"
    return Case(way, _filled(stream, text), becomes if way == "at once" else "any")


def _filled(stream: random.Random, text: str) -> str:
    for name, values in hostile.PARAMETERS.items():
        while name in text.replace("f.FD", ""):
            before, _, after = text.partition(name)
            # A name that is part of a longer word is that word.
            text = before + stream.choice(values) + after
    return text


def check(seed: int, number: int) -> Iterator[str]:
    """Yield the hostile rewards that came through."""
    stream = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        for i, case in enumerate(cases(stream, number)):
            folder = Path(name) / str(i)
            folder.mkdir()
            sleep = f"{70_000 + stream.randrange(10_000)}.{os.getpid()}"
            (folder / "reward.py").write_text(case.source(sleep))
            # Some go through a whole run.
            attempt = _try_run if i % 25 == 24 else _try_pool
            for what in (*attempt(folder, case), *_left(folder, sleep)):
                yield f"{what} <- {case}"


def _try_pool(folder: Path, case: Case) -> Iterator[str]:
    before, start = resident_bytes(), time.monotonic()
    target = f"{folder / 'reward.py'}:score"
    pool = RewardPool(target, 1, TIMEOUT_S, 1.0, LIMITS)

    # An import that hangs is refused within the limit, too.
    with _watching() as seen, mock.patch.object(process, "START_S", 12.0):
        try:
            pool.start()
            scored = asyncio.run(_scores(pool))
        except CouplerError as error:
            scored = []
            if case.way != "at import" or len(str(error)) > MOST_TEXT:
                yield f"the pool ended: {str(error)[:300]!r}"
        except BaseException as error:
            scored = []
            yield f"{type(error).__name__} came out: {str(error)[:300]!r}"
        finally:
            pool.close()

    took, grown = time.monotonic() - start, resident_bytes() - before
    if scored:
        yield from _results(scored, case)
    if took > TIMEOUT_S + SLACK_S:
        yield f"it took {took:.0f} s"
    if grown > MOST_MEMORY:
        yield f"the trainer grew by {grown >> 20} MB"
    if seen.written > MOST_OUTPUT:
        yield f"{seen.written >> 20} MB were printed"
    yield from seen.raised


async def _scores(pool: RewardPool) -> list[Scored]:
    texts = [str(i) for i in range(HONEST)]
    texts.insert(HONEST // 2, "evil")
    row = {"prompt": "p", "answer": "a"}
    calls = asyncio.gather(*(pool.call(text, "a", dict(row)) for text in texts))
    return await asyncio.wait_for(calls, TIMEOUT_S + 2 * SLACK_S)


def _results(scored: list[Scored], case: Case) -> Iterator[str]:
    evil = scored.pop(HONEST // 2)
    found = [s.result for s in scored]
    if found != [float(i) for i in range(HONEST)]:
        yield f"honest calls got {found}"

    number = not isinstance(evil.result, Invalid)
    if case.becomes != "any" and number is not (case.becomes == "number"):
        yield f"the call got {evil.result}"
    if number and (type(evil.result) is not float or not math.isfinite(evil.result)):
        yield f"the call got {evil.result!r}"
    texts = [evil.detail, evil.answer or "", "" if number else evil.result.reason]
    if max(map(len, texts)) > MOST_TEXT:
        yield f"a text has {max(map(len, texts))} characters"
    try:
        "".join(texts).encode()
    except UnicodeError:
        yield "a text cannot be written"


def _try_run(folder: Path, case: Case) -> Iterator[str]:
    source = (folder / "reward.py").read_text()
    write_inputs(folder)
    source = source.replace(
        "    if completion == 'evil':",
        "    evil = row['answer'] == '3'\n    completion = len(completion)\n    if evil:",
    )
    (folder / "reward.py").write_text(source)
    more = (
        *("steps=3", f"reward.timeout_s={TIMEOUT_S}", "reward.max_invalid_fraction=1"),
        *("reward.max_memory_gib=0.5", "reward.max_processes=150", "reward.sandbox=off"),
    )
    said = call(arguments(folder, folder / "run", *more))
    if said.raised or said.code not in ((0, 2) if case.way == "at import" else (0,)):
        yield f"a run ended with {said.raised or said.code}: {said.text[-600:]!r}"


@dataclass(slots=True)
class _Seen:
    """Counts what is written, and keeps what threads raise."""

    written: int
    raised: list[str]

    def write(self, text: str) -> int:
        self.written += len(text)
        return len(text)

    def flush(self) -> None:
        return


@contextmanager
def _watching() -> Iterator[_Seen]:
    seen = _Seen(0, [])

    def raised(args: Any) -> None:
        seen.raised.append(f"a thread raised {args.exc_type.__name__}: {args.exc_value}")

    stderr, hook = sys.stderr, threading.excepthook
    sys.stderr, threading.excepthook = seen, raised  # type: ignore[assignment]
    try:
        yield seen
    finally:
        sys.stderr, threading.excepthook = stderr, hook


def _left(folder: Path, sleep: str) -> Iterator[str]:
    """Say which processes and files of a case are left."""
    marks = (sleep.encode(), str(folder).encode() + b"/")
    for path in Path("/proc").glob("[0-9]*"):
        if int(path.name) == os.getpid():
            continue
        try:
            command = (path / "cmdline").read_bytes()
            state = (path / "stat").read_bytes().rpartition(b") ")[2][:1]
        except OSError:
            continue
        if state != b"Z" and any(mark in command for mark in marks):
            yield f"process {path.name} is left: {command[:200]!r}"
            os.kill(int(path.name), 9)
    if cores := [path.name for path in (*folder.glob("core*"), *Path().glob("core.*"))]:
        yield f"files are left: {cores}"


if __name__ == "__main__":
    run(check, 300)
