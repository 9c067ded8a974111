"""Let calls of the operating system fail while a run writes its folder."""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.faults import run
from tests.faults.toy_runs import arguments, call, steps, write_inputs

from coupler.run.checkpoint import newest

ERRORS = ("ENOSPC", "EIO", "EROFS", "EACCES", "EDQUOT", "ESTALE", "EPERM")
CALLS = ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir", "listdir", "stat", "open")


def check(seed: int, cases: int) -> Iterator[str]:
    """Yield a line for each fault that does not end in a sentence, or loses a state."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        write_inputs(folder)
        assert call(arguments(folder, folder / "whole", "steps=1")).code == 0
        assert call(arguments(folder, folder / "longer", "steps=3")).code == 0
        expected = steps(folder / "longer")
        for number in range(cases):
            yield from _try(folder, folder / f"case{number}", expected, chance)


def _try(folder: Path, case: Path, expected: list[Any], chance: random.Random) -> Iterator[str]:
    run_dir = case / "run"
    if goes_on := chance.random() < 0.7:
        shutil.copytree(folder / "whole", run_dir)
    code = getattr(errno, chance.choice(ERRORS))
    kind = chance.choice((*CALLS, "write", "close", "vanish"))
    given = arguments(folder, run_dir, "steps=3")
    if goes_on and chance.random() < 0.2:
        given = ["export", str(run_dir), "--out", str(run_dir / "out")]
    at, lasts = chance.randrange(1, 60), chance.random() < 0.5
    what = f"{kind} {errno.errorcode[code]} at call {at}{' and after' if lasts else ''}: {given[0]}"

    with _failing(kind, code, run_dir, at, lasts):
        said = call(given)
    if not said.is_answered:
        yield f"{what}: {said.raised or said.code} {said.text[-1500:]}"
    if kind != "vanish":
        yield from _check_after(folder, run_dir, goes_on, expected, what)
    shutil.rmtree(case, ignore_errors=True)


def _check_after(
    folder: Path, run_dir: Path, goes_on: bool, expected: list[Any], what: str
) -> Iterator[str]:
    """The last whole checkpoint is there, and the run ends as it would have."""
    if goes_on and newest(run_dir / "checkpoints")[0] is None:
        yield f"{what}: no checkpoint is whole any more"
    said = call(arguments(folder, run_dir, "steps=3"))
    if said.code != 0:
        yield f"{what}: it does not go on afterwards: {said.raised} {said.text[-800:]}"
    elif steps(run_dir) != expected:
        yield f"{what}: other numbers than without the fault"


@contextmanager
def _failing(kind: str, code: int, run_dir: Path, at: int, lasts: bool) -> Iterator[None]:
    """Let one kind of call fail from the ``at``-th on, if it is about ``run_dir``."""
    count = 0

    def fails(path: object) -> bool:
        nonlocal count
        if not str(path).startswith(str(run_dir)):
            return False
        count += 1
        return count == at or (lasts and count > at)

    def refuse(path: object) -> None:
        if not fails(path):
            return
        if kind == "vanish":
            shutil.rmtree(run_dir, ignore_errors=True)
        else:
            raise OSError(code, os.strerror(code), str(path))

    with _patched(*_patches(kind, refuse)):
        yield


def _patches(kind: str, refuse: Callable[[object], None]) -> list[tuple[Any, str, Any]]:
    if kind in ("open", "vanish"):
        return [(io, "open", _guarded(io.open, refuse)), (os, "open", _guarded(os.open, refuse))]
    if kind in ("write", "close"):
        real = io.open

        def opened(file: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
            found = real(file, mode, *args, **named)
            return _Proxy(found, file, kind, refuse) if set(mode) & set("wa") else found

        return [(io, "open", opened)]
    if kind == "fsync":
        by_number = lambda number: refuse(os.readlink(f"/proc/self/fd/{number}"))  # noqa: E731
        return [(os, "fsync", _guarded(os.fsync, by_number))]
    return [(os, kind, _guarded(getattr(os, kind), refuse))]


def _guarded(real: Callable[..., Any], refuse: Callable[[object], None]) -> Callable[..., Any]:
    def call_it(first: Any, *args: Any, **named: Any) -> Any:
        refuse(first)
        return real(first, *args, **named)

    return call_it


class _Proxy:
    """Stands for an open file whose writes or whose close the disk may refuse."""

    def __init__(self, file: Any, path: object, kind: str, refuse: Any) -> None:
        self._file, self._path, self._kind, self._refuse = file, path, kind, refuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Any:
        return iter(self._file)

    def write(self, data: Any) -> int:
        if self._kind == "write":
            self._refuse(self._path)
        return self._file.write(data)

    def close(self) -> None:
        closed = self._file.closed
        self._file.close()
        if self._kind == "close" and not closed:
            self._refuse(self._path)


@contextmanager
def _patched(*patches: tuple[Any, str, Any]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


if __name__ == "__main__":
    run(check, 60)
