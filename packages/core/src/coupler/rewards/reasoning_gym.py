"""Score rows of ``coupler.data.reasoning_gym:rows`` by the verifiers of their tasks."""

from __future__ import annotations

import ast
import json
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from coupler.data.reasoning_gym import create, library
from coupler.rewards.result import Graded, Invalid
from coupler.rewards.verifiers import Guard, check_safe, disarm, fill_tables

NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
OPEN, CLOSE = "<answer>", "</answer>"
# A longer text is no answer to any task, and scores 0.
MAX_ANSWER = 20_000
# Seconds of the processor that a verifier may take for one answer. A verifier in C that
# does not come back for so long loses its process soon after.
MAX_CPU_S, KILL_CPU_S = 2.0, 3.0
# Memory that it may take on top of what the process had.
MAX_BYTES = 2 << 30


class Score:
    """Give the task's own score of the text in the last ``<answer>`` tags.

    Without such tags the whole completion is scored. Most tasks give partial credit, in
    part for no merit: chain_sum scores a wrong sentence by the share that the right
    number has in it, and countdown gives 0.01 for a wrong answer. Read the task's
    verifier before you train on this.

    The verifiers are not the user's code, and a model writes what they read. They run
    in a sandbox, unless ``reward.sandbox=off``.
    """

    sandbox = True

    def __init__(self) -> None:
        # A worker imports it at its start, so that the first call does not pay for it.
        library()
        disarm()
        # knights_knaves imports it late, where a sandbox may load no library.
        import_module("numpy.random")

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Graded | Invalid:
        text = last_answer(completion).strip()
        if len(text) > MAX_ANSWER:
            return Graded(0.0, "")
        return score(row["task"], row["task_config"], row["entry"], text)


class Exact(Score):
    """Give 1 for a full score, else 0."""

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Graded | Invalid:
        graded = super().__call__(completion, row)
        if isinstance(graded, Invalid):
            return graded
        return Graded(float(graded.reward == 1.0), graded.answer)


class LastNumber(Exact):
    """Give 1 if the last number in the text is the answer, else 0.

    Made for arithmetic, however the answer is worded.
    """

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Graded | Invalid:
        numbers = NUMBER.findall(completion)
        last = numbers[-1].replace(",", "") if numbers else ""
        return super().__call__(last, row) if numbers else Graded(0.0, "")


def last_answer(completion: str) -> str:
    """Return the text in the last ``<answer>`` tags, or all of it without such tags."""
    found, position = completion, 0
    while (start := completion.find(OPEN, position)) >= 0:
        position = completion.find(CLOSE, start)
        if position < 0:
            break
        found = completion[start + len(OPEN) : position]
    return found


def score(task: str, task_config: Any, entry: str, text: str) -> Graded | Invalid:
    """Score ``text`` by the verifier of ``task``, watched and in bounded time."""
    verifier = _verifier(task, json.dumps(task_config))
    facts = _entry(entry)
    guard = _guard()
    reward = 0.0

    with guard.on(), _limited() as slow:
        try:
            reward = float(verifier.score_answer(text, facts))
        except Exception:
            # A verifier that reads its own answer but not this text finds it wrong.
            if not slow and not guard.refused:
                verifier.score_answer(str(facts["answer"] or ""), facts)

    if guard.refused:
        return Invalid(f"the verifier of {task} tried what the text must not do: {guard.refused}")
    if slow:
        return Invalid(f"the verifier of {task} took longer than {MAX_CPU_S:g} s")
    return Graded(reward, text)


@contextmanager
def _limited() -> Iterator[list[bool]]:
    """Interrupt what runs within after ``MAX_CPU_S``, and note that in a list.

    The kernel ends the process after ``KILL_CPU_S``, whatever the interpreter does.
    """
    slow: list[bool] = []

    def interrupt(*_: Any) -> None:
        slow.append(True)
        raise TimeoutError(f"took longer than {MAX_CPU_S:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield slow
        return

    import resource  # Windows has none

    before = signal.signal(signal.SIGVTALRM, interrupt)
    killing = signal.signal(signal.SIGPROF, signal.SIG_DFL)
    memory = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_most_bytes(memory[1]), memory[1]))
    # A verifier that catches the first interruption gets another.
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_S, 0.1)
    signal.setitimer(signal.ITIMER_PROF, KILL_CPU_S)
    try:
        yield slow
    except TimeoutError:
        if not slow:
            raise
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_DATA, memory)
        signal.signal(signal.SIGPROF, killing)
        signal.signal(signal.SIGVTALRM, before)


@lru_cache(1)
def _most_bytes(hard: int) -> int:
    """Return the limit of private memory of a process that scores."""
    import resource

    file = Path("/proc/self/statm")
    pages = int(file.read_text().split()[5]) if file.exists() else 0
    limit = pages * resource.getpagesize() + MAX_BYTES
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


@lru_cache(1)
def _guard() -> Guard:
    return Guard()


@lru_cache(8)
def _verifier(task: str, task_config: str) -> Any:
    verifier = create(task, {"size": 1, "seed": 0, **json.loads(task_config)})
    check_safe(task, type(verifier))
    fill_tables(type(verifier))
    return verifier


@lru_cache(256)
def _entry(literal: str) -> dict[str, Any]:
    return ast.literal_eval(literal)
