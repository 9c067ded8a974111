"""Damage the files of a run folder, and look into it and go on with it."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.faults import run
from tests.faults.toy_runs import arguments, call, steps, write_inputs

Damage = Callable[[Path, Path, random.Random], object]
# A run that samples ahead has groups in its checkpoints that are not trained yet.
# Which weights sample them is a matter of time, and so are its numbers.
AHEAD = "ahead"
KINDS = {
    "in turns": (),
    AHEAD: ("max_staleness=1", "deterministic=false"),
    "with a critic": ("algorithm=judged", "critic.engine.lr=0.3"),
}


def check(seed: int, cases: int) -> Iterator[str]:
    """Yield a line for each damage that a command does not answer well."""
    chance = random.Random(seed)
    judged = mock.patch.dict(os.environ, {"COUPLER_PLUGINS": "tests.faults.toy_critic"})
    with tempfile.TemporaryDirectory(prefix="faults-") as name, judged:
        folder = Path(name)
        write_inputs(folder)
        _make(folder, "other", "engine.lr=0.2", "seed=3", "steps=2")
        expected = {}
        for kind, more in KINDS.items():
            _make(folder, kind, "steps=2", *more)
            longer = steps(_make(folder, f"{kind}-longer", "steps=3", *more))
            expected[kind] = [_told(kind, step) for step in longer]

        for number in range(cases):
            kind = chance.choice(sorted(KINDS))
            for line in _try(folder, folder / f"case{number}", kind, expected[kind], chance):
                yield f"{kind}: {line}"


def _make(folder: Path, name: str, *more: str) -> Path:
    said = call(arguments(folder, folder / name, *more))
    assert said.code == 0, said
    return folder / name


def _try(
    folder: Path, case: Path, kind: str, expected: list[object], chance: random.Random
) -> Iterator[str]:
    run_dir = case / "run"
    shutil.copytree(folder / kind, run_dir)
    done = [_damage(run_dir, folder / "other", chance) for _ in range(chance.choice((1, 1, 1, 2)))]
    what = " and ".join(done)
    run_json = run_dir / "run.json"
    outside = {p: p.read_bytes() for p in (folder / "other").rglob("*") if p.is_file()}

    commands = {
        "export": ["export", str(run_dir), "--out", str(case / "out")],
        "replay": ["replay", str(run_dir), "--step", "2", "--stage", "train"],
        "eval": [
            "eval",
            str(run_dir),
            f"run_dir={case / 'eval'}",
            f"eval.data.source={folder / 'rows.jsonl'}",
            "eval.data.max_prompt_tokens=64",
        ],
        "resume": arguments(folder, run_dir, "steps=3", *KINDS[kind]),
    }
    asked = [chance.choice(("export", "replay", "eval")), "resume"]
    for name in asked:
        said = call(commands[name])
        if not said.is_answered:
            yield f"{what}: {name}: {said.raised or said.code} {said.text[-1500:]}"
        elif name == "resume" and said.code == 0:
            yield from _check_metrics(run_dir, kind, expected, what, said.text)
    for path, content in outside.items():
        if path.read_bytes() != content:
            yield f"{what}: {path} of another run was changed"
            path.write_bytes(content)
    if run_json.is_file() and call(commands["export"]).raised:
        yield f"{what}: the next export failed"
    shutil.rmtree(case, ignore_errors=True)


def _told(kind: str, step: dict[str, Any]) -> object:
    return step["step"] if kind == AHEAD else step


def _check_metrics(
    run_dir: Path, kind: str, expected: list[object], what: str, said: str
) -> Iterator[str]:
    """Steps that are kept have their numbers, or a message says that they do not."""
    try:
        found = [_told(kind, step) for step in steps(run_dir)]
    except (OSError, ValueError) as error:
        yield f"{what}: the metrics afterwards: {error}"
        return
    if found[-1:] != expected[-1:]:
        yield f"{what}: the last step is another one than without damage"
    if found != expected and "metrics.jsonl" not in said:
        yield f"{what}: metrics were lost or altered without a word"


def _damage(run_dir: Path, other: Path, chance: random.Random) -> str:
    files = sorted(path for path in run_dir.rglob("*") if path.is_file())
    folders = sorted(path for path in run_dir.rglob("*") if path.is_dir())
    path = chance.choice([*files, *files, *folders]) if chance.random() < 0.7 else None
    if path is None:
        # The files of the run itself are few among those of its checkpoints.
        path = chance.choice(sorted(run_dir.iterdir()))
    # What was damaged once may be a pipe now, which nobody reads.
    kinds = {**ANY, **(OF_FOLDERS if path.is_dir() else OF_FILES if path.is_file() else {})}
    name = chance.choice(sorted(kinds))
    kinds[name](path, other / path.relative_to(run_dir), chance)
    return f"{path.relative_to(run_dir)} {name}"


def _replace(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _replaced(make: Damage) -> Damage:
    def damage(path: Path, twin: Path, chance: random.Random) -> None:
        _replace(path)
        make(path, twin, chance)

    return damage


def _bytes(change: Callable[[bytes, random.Random], bytes]) -> Damage:
    return lambda path, _, chance: path.write_bytes(change(path.read_bytes(), chance))


def _flip(content: bytes, chance: random.Random) -> bytes:
    if not content:
        return b"\1"
    at = chance.randrange(len(content))
    return content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :]


def _insert(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content) + 1)
    return content[:at] + chance.randbytes(chance.randrange(1, 40)) + content[at:]


def _cut_out(content: bytes, chance: random.Random) -> bytes:
    at, end = sorted(chance.randrange(len(content) + 1) for _ in range(2))
    return content[:at] + content[end:]


def _lines(change: Callable[[list[bytes], random.Random], list[bytes]]) -> Damage:
    return _bytes(lambda content, chance: b"".join(change(content.splitlines(True), chance)))


def _without_a_line(lines: list[bytes], chance: random.Random) -> list[bytes]:
    at = chance.randrange(len(lines) + 1)
    return lines[:at] + lines[at + 1 :]


def _shuffled(lines: list[bytes], chance: random.Random) -> list[bytes]:
    return chance.sample(lines, len(lines))


def _change_json(path: Path, _: Path, chance: random.Random) -> None:
    """Give a random key of a JSON file another value, where it is one."""
    values = (None, -1, 1e308, "x", [], {}, True, 10**30, [[[]]], "\0")
    try:
        found = json.loads(path.read_text())
    except ValueError:
        path.write_text(json.dumps(chance.choice(values)))
        return
    inner = chance.choice(found) if isinstance(found, list) and found else found
    if isinstance(inner, dict) and inner:
        inner[chance.choice(sorted(inner))] = chance.choice(values)
    path.write_text(json.dumps(found if chance.random() < 0.8 else chance.choice(values)))


def _socket(path: Path, _: Path, __: random.Random) -> None:
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _copy_twin(path: Path, twin: Path, _: random.Random) -> None:
    if twin.is_dir():
        shutil.copytree(twin, path)
    elif twin.is_file():
        shutil.copyfile(twin, path)


def _swap(path: Path, _: Path, chance: random.Random) -> None:
    """Exchange two neighbours."""
    others = [p for p in path.parent.iterdir() if p != path and p.is_dir() == path.is_dir()]
    if others:
        other, aside = chance.choice(sorted(others)), path.with_name("swapped")
        path.rename(aside)
        other.rename(path)
        aside.rename(other)


def _rename(path: Path, _: Path, chance: random.Random) -> None:
    names = (f"{path.name}.bak", f"{path.name}.part", "step_9", "step_0", "step_x", "step_²", "a")
    new = path.with_name(chance.choice(names))
    if not os.path.lexists(new):
        path.rename(new)


def _add(path: Path, twin: Path, chance: random.Random) -> None:
    """Put a file that nobody listed beside ``path``."""
    names = ("99.npz", "x.safetensors", "notes.txt", ".DS_Store", "step_7", "groups", "a.part")
    new = path.with_name(chance.choice(names))
    if not os.path.lexists(new):
        new.write_bytes(twin.read_bytes() if twin.is_file() else b"x" * 99)


def _link_in(path: Path, twin: Path, _: random.Random) -> None:
    if twin.exists():
        path.symlink_to(twin)


def _hard_link(path: Path, twin: Path, _: random.Random) -> None:
    if twin.is_file():
        path.unlink()
        os.link(twin, path)


def _folder_over(path: Path, _: Path, chance: random.Random) -> None:
    path.mkdir()
    if chance.random() < 0.5:
        (path / "inside").write_text("x")


ANY: dict[str, Damage] = {
    "missing": lambda path, *_: _replace(path),
    "a folder": _replaced(_folder_over),
    "an empty file": _replaced(lambda path, *_: path.touch()),
    "a pipe": _replaced(lambda path, *_: os.mkfifo(path)),
    "a socket": _replaced(_socket),
    "a link to itself": _replaced(lambda path, *_: path.symlink_to(path.name)),
    "a dangling link": _replaced(lambda path, *_: path.symlink_to("nowhere")),
    "a link to /dev/null": _replaced(lambda path, *_: path.symlink_to("/dev/null")),
    "a link to /dev/zero": _replaced(lambda path, *_: path.symlink_to("/dev/zero")),
    "a link to its folder": _replaced(lambda path, *_: path.symlink_to(".")),
    "that of another run": _replaced(_copy_twin),
    "a link to another run": _replaced(_link_in),
    "swapped": _swap,
    "renamed": _rename,
    "not alone": _add,
}
OF_FOLDERS: dict[str, Damage] = {
    "emptied": lambda path, *_: [_replace(inner) for inner in path.iterdir()],
    "twice": lambda path, *_: shutil.copytree(path, path.with_name("step_8"), dirs_exist_ok=True),
    "without a file": lambda path, _, chance: _replace(chance.choice([*path.iterdir()])),
}
OF_FILES: dict[str, Damage] = {
    "torn": _bytes(lambda content, chance: content[: chance.randrange(len(content) + 1)]),
    "torn at the start": _bytes(lambda content, chance: content[chance.randrange(9) :]),
    "with a bit flipped": _bytes(_flip),
    "with bytes inserted": _bytes(_insert),
    "with a hole": _bytes(_cut_out),
    "zeros": _bytes(lambda content, _: bytes(len(content))),
    "random": _bytes(lambda content, chance: chance.randbytes(len(content))),
    "with zeros at its end": _bytes(lambda content, _: content + bytes(512)),
    "in UTF-16": _bytes(lambda content, _: content.decode("latin-1").encode("utf-16")),
    "in Latin-1": _bytes(lambda content, _: content + "ü".encode("latin-1")),
    "with a byte order mark": _bytes(lambda content, _: b"\xef\xbb\xbf" + content),
    "with carriage returns": _bytes(lambda content, _: content.replace(b"\n", b"\r\n")),
    "of spaces": _bytes(lambda *_: b" \n \n"),
    "doubled": _bytes(lambda content, _: content * 2),
    "without a line": _lines(_without_a_line),
    "with lines in another order": _lines(_shuffled),
    "nested": _bytes(lambda *_: b"[" * 99_999),
    "a list of lists": _bytes(lambda *_: b"[[1], [2]]"),
    "an empty object": _bytes(lambda *_: b"{}"),
    "null": _bytes(lambda *_: b"null"),
    "a long number": _bytes(lambda *_: b"9" * 9_999),
    "with another value": _change_json,
    "a YAML bomb": _bytes(lambda *_: b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"),
    "a hard link to another run": _hard_link,
}

if __name__ == "__main__":
    run(check, 600)
