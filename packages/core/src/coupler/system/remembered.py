"""Remember the answers of contained calls while what they read is unchanged."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from json import dumps
from pathlib import Path
from typing import Any
from weakref import finalize

from coupler.system.contained import Answer, Call, Contained
from coupler.system.user_cache import read_cached, write_cached

# A call that failed is tried again after this time: the machine may have been at fault.
FAILED_S = 600.0
MAX_ENTRIES, MAX_FILES = 300, 2000
SUFFIXES = (".py", ".so", ".pyd", ".yaml")


@dataclass(frozen=True, slots=True)
class Question:
    """Question is a call whose answer can be remembered.

    Attributes:
        identity: what tells this question from others, such as names and versions.
        files: files and folders on which the answer depends, beside what is imported.
        package: the module that the answer is about. Its place tells checkouts apart,
            and its files count where the call does not get to say what it imported.
    """

    call: Call
    identity: tuple[str, ...]
    files: tuple[str, ...] = ()
    package: str = ""

    @property
    def key(self) -> str:
        spec = _spec_of(self.package)
        place = spec.origin if spec else ""
        asked = (self.call.target, self.call.arguments, self.identity, place)
        told = [sys.version, sys.prefix, *asked]
        return hashlib.sha256(dumps(told).encode()).hexdigest()


class Remembered:
    """Answers questions from the cache ``name``, and those that it lacks by calls.

    Attributes:
        known: the answers so far.
    """

    def __init__(self, name: str, questions: Mapping[str, Question], limit_s: float) -> None:
        self.questions = dict(questions)
        entries = read_cached(name)
        found = {key: _still_true(entries.get(q.key)) for key, q in self.questions.items()}
        self.known = {key: answer for key, answer in found.items() if answer is not None}
        self.remembered = set(self.known)

        asked = {key: q.call for key, q in self.questions.items() if key not in self.known}
        self._store = _Store(name, self.questions, entries)
        self._calls = Contained(asked, limit_s)
        self._close = finalize(self, _close, self._calls, self._store)

    @property
    def pending(self) -> list[str]:
        return self._calls.pending

    def wait(self, seconds: float | None = None) -> dict[str, Answer]:
        """Return the answers that come within ``seconds``, or within the limit."""
        answers = self._calls.wait(seconds)
        self._store.answers |= answers
        self.known |= answers
        if answers and not self.pending:
            self._store.write()
        return answers

    def again(self, keys: Iterable[str], limit_s: float) -> dict[str, Answer]:
        """Ask once more, whatever is remembered."""
        answers = Contained({key: self.questions[key].call for key in keys}, limit_s).all()
        self.remembered -= answers.keys()
        self._store.answers |= answers
        self._store.write()
        self.known |= answers
        return answers


class _Store:
    """Holds what is to be written to the cache."""

    def __init__(
        self, name: str, questions: Mapping[str, Question], entries: dict[str, Any]
    ) -> None:
        self.name, self.questions, self.entries = name, questions, entries
        self.answers: dict[str, Answer] = {}

    def write(self) -> None:
        if not self.answers:
            return
        new = {self.questions[k].key: _entry(self.questions[k], a) for k, a in self.answers.items()}
        self.answers.clear()

        # Another process may have written since.
        entries = {**self.entries, **read_cached(self.name), **new}
        used = {question.key for question in self.questions.values()}
        kept = sorted(entries, key=lambda key: (key in used, _time_of(entries[key])))
        self.entries = {key: entries[key] for key in kept[-MAX_ENTRIES:]}
        write_cached(self.name, self.entries)


def _close(calls: Contained, store: _Store) -> None:
    while calls.pending and (answers := calls.wait(0)):
        store.answers |= answers
    calls.close()
    with suppress(OSError, ValueError):
        store.write()


def _entry(question: Question, answer: Answer) -> dict[str, Any]:
    files: list[str] = [*question.files, *answer.files]
    if isinstance(answer.value, dict):
        files += [file for file in answer.value.get("files", ()) if isinstance(file, str)]
    if answer.error:
        # What is missing may be installed.
        files += [*(path or "." for path in sys.path), *_files_of(question.package)]
    return {**asdict(answer), "files": [[f, *_stamp(f)] for f in files], "time": time.time()}


def _still_true(entry: Any) -> Answer | None:
    """Return the answer that an entry holds, unless something has changed since."""
    try:
        age = time.time() - entry["time"]
        if entry["error"] and not 0 <= age < FAILED_S:
            return None
        if any([file, *_stamp(file)] != [file, *stamp] for file, *stamp in entry["files"]):
            return None
        answer = Answer(entry["value"], entry["error"], (), entry["hung"])
    except (KeyError, TypeError, ValueError):
        return None
    return answer if isinstance(answer.error, str) and isinstance(answer.hung, bool) else None


def _time_of(entry: Any) -> float:
    found = entry.get("time") if isinstance(entry, dict) else None
    return found if isinstance(found, float) else 0.0


def _stamp(file: str) -> list[int]:
    try:
        status = os.stat(file)
    except (OSError, ValueError):
        return [0, 0]
    return [status.st_mtime_ns, status.st_size]


def _spec_of(package: str) -> ModuleSpec | None:
    """Find the module or package at the top of ``package``, without importing it."""
    try:
        return find_spec(package.partition(".")[0]) if package else None
    except (ImportError, ValueError, AttributeError):
        return None


def _files_of(package: str) -> list[str]:
    """Return the sources of a module or package, which is not imported."""
    spec = _spec_of(package)
    if spec is None:
        return []

    files = [spec.origin] if spec.origin else []
    for folder in spec.submodule_search_locations or ():
        found = (file for file in Path(folder).rglob("*") if file.suffix in SUFFIXES)
        files += [str(file) for file, _ in zip(found, range(MAX_FILES), strict=False)]
    return files
