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

ERRORS = (
    "ENOSPC", "EIO", "EROFS", "EACCES", "EDQUOT", "ESTALE", "EPERM", "ENODEV", "EMFILE", "ENFILE",
    "ENAMETOOLONG", "ETXTBSY", "EBUSY", "ENXIO", "EFBIG", "ENOTCONN", "ETIMEDOUT", "EREMOTEIO",
)  # fmt: skip
CALLS = (
    "mkdir", "rename", "replace", "fsync", "unlink", "rmdir", "listdir", "scandir", "stat", "lstat",
    "open", "access",
)  # fmt: skip
WAYS = (
    (), ("checkpoint.asynchronous=false",), ("checkpoint.keep_last=1",), ("record.every_steps=0",),
    ("trackers=[console,jsonl]",), ("checkpoint.export=false",), ("checkpoint.contents=[model,extra]",),
)  # fmt: skip
# Samples run ahead of training. What a step trains on depends on time then.
AHEAD = ("max_staleness=1", "deterministic=false")


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
    kind = chance.choice((*CALLS, "write", "write", "read", "close", "vanish"))
    more = chance.choice(WAYS)
    ahead = not goes_on and chance.random() < 0.3
    # A run that goes on without its moments has other numbers, too.
    same = not ahead and "checkpoint.contents=[model,extra]" not in more
    given = arguments(folder, run_dir, "steps=3", *more, *(AHEAD if ahead else ()))
    if goes_on and chance.random() < 0.2:
        given = ["export", str(run_dir), "--out", str(run_dir / "out")]
    at, lasts = chance.randrange(1, 60), chance.random() < 0.5
    asked = f"{given[0]} {more} {'ahead' if ahead else ''}"
    what = f"{kind} {errno.errorcode[code]} at call {at}{' and after' if lasts else ''}: {asked}"

    with _failing(kind, code, run_dir, at, lasts):
        said = call(given)
    if not said.is_answered:
        yield f"{what}: {said.raised or said.code} {said.text[-1500:]}"
    if kind != "vanish":
        again = given if given[0] == "train" else arguments(folder, run_dir, "steps=3")
        yield from _check_after(run_dir, again, goes_on, expected if same else [], what)
    shutil.rmtree(case, ignore_errors=True)


def _check_after(
    run_dir: Path, again: list[str], goes_on: bool, expected: list[Any], what: str
) -> Iterator[str]:
    """The last whole checkpoint is there, and the run ends as it would have."""
    if goes_on and newest(run_dir / "checkpoints")[0] is None:
        yield f"{what}: no checkpoint is whole any more"
    said = call(again)
    if said.code != 0:
        yield f"{what}: it does not go on afterwards: {said.raised} {said.text[-800:]}"
    elif expected and _numbers(steps(run_dir)) != _numbers(expected):
        yield f"{what}: other numbers than without the fault"


def _numbers(lines: list[Any]) -> list[Any]:
    """Return the numbers of training, which the ways to write them do not change."""
    kept = ("step", "loss", "reward/mean", "grad_norm", "lr")
    return [{key: line[key] for key in kept if key in line} for line in lines]


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
    if kind in ("write", "read", "close"):
        real = io.open

        def opened(file: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
            found = real(file, mode, *args, **named)
            name = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else file
            wanted = bool(set(mode) & set("wa")) != (kind == "read")
            return _Proxy(found, name, kind, refuse) if wanted else found

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

    def read(self, *size: Any) -> Any:
        if self._kind == "read":
            self._refuse(self._path)
        return self._file.read(*size)

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
    run(check, 400)
