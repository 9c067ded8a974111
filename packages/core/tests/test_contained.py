"""A contained call gives its caller an answer or a sentence, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coupler.run.provenance import installed
from coupler.system import remembered
from coupler.system.contained import Answer, Call, Contained
from coupler.system.installed import entries
from coupler.system.process_memory import resident_bytes
from coupler.system.remembered import Question, Remembered
from coupler.system.shapes import WrongShape, each_of, fits
from coupler.system.user_cache import read_cached, write_cached

CALLS = """
import os, signal, subprocess, sys, threading, time

def value(x): return {"x": x}
def counts():
    with open(os.environ["COUNTED"], "a") as file: file.write("x")
    return os.path.getsize(os.environ["COUNTED"])
def exits(): print("goodbye"); sys.stdout.flush(); os._exit(3)
def segfaults(): os.kill(os.getpid(), signal.SIGSEGV)
def kills_parent(): os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)
def raises(): raise SystemExit("no")
def hangs(): time.sleep(1000)
def works():
    while time.process_time() < 0.3: pass
    return 1
def prints():
    while True: print("x" * 1000)
def is_large(): return "x" * 2_000_000
def is_no_json(): return {1}
def has_thread(): threading.Thread(target=time.sleep, args=(1000,)).start(); return 1
def leaves():
    if not os.fork():
        os.setsid()
        open(os.environ["LEFT"], "w").write(str(os.getpid()))
        time.sleep(1000)
    while not os.path.exists(os.environ["LEFT"]): time.sleep(0.01)
    return 1
"""
ERRORS = {
    "exits": "it exited with code 3, and printed last: goodbye",
    "segfaults": "it was killed by SIGSEGV",
    "kills_parent": "it was killed by SIGKILL",
    "raises": "SystemExit: no",
    "is_large": "its answer is damaged or too long",
    "is_no_json": "TypeError: Object of type set is not JSON serializable",
    "hangs": "it takes too long",
    "prints": "it takes too long",
}


@pytest.fixture(autouse=True)
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of calls, and a cache of its own."""
    (tmp_path / "contained_calls.py").write_text(CALLS)
    monkeypatch.syspath_prepend(tmp_path)
    # It is no news in a folder of the path.
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COUNTED", str(tmp_path / "counted"))
    monkeypatch.setenv("LEFT", str(tmp_path / "left"))
    return tmp_path / "contained_calls.py"


def call(name: str, *arguments: object) -> Call:
    return Call(f"contained_calls:{name}", arguments)


@pytest.fixture(params=["one-thread", "threads"])
def caller(request: pytest.FixtureRequest) -> Iterator[None]:
    """With threads in the caller, another interpreter takes the place of a fork."""
    over = threading.Event()
    if request.param == "threads":
        threading.Thread(target=over.wait, args=(120,), daemon=True).start()
    yield
    over.set()


@pytest.mark.usefixtures("caller")
def test_every_call_has_an_answer_of_its_own(capfd: pytest.CaptureFixture) -> None:
    names = {name: call(name) for name in (*ERRORS, "has_thread")}
    answers = Contained({"value": call("value", [1]), **names}, limit_s=10.0).all()

    assert (answers["value"].value, answers["has_thread"].value) == ({"x": [1]}, 1)
    errors = {name: answers[name].error for name in ERRORS}
    # A busy machine may take the whole limit to write the large answer.
    large = errors.pop("is_large")
    assert large in (ERRORS["is_large"], "it takes too long")
    assert errors == {name: error for name, error in ERRORS.items() if name != "is_large"}
    hung = {name for name, answer in answers.items() if answer.hung}
    assert {"hangs", "prints"} <= hung <= {"hangs", "prints", "is_large"}
    assert capfd.readouterr() == ("", "")


def test_what_a_call_leaves_ends_with_it(tmp_path: Path) -> None:
    assert Contained({"leaves": call("leaves")}, 30.0).all()["leaves"].value == 1
    deadline = time.monotonic() + 10
    while _is_alive(int((tmp_path / "left").read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def busy() -> Iterator[None]:
    """One processor for this process, which twenty others want too."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    # Linux shares processors among sessions first.
    spin = [sys.executable, "-c", "while True: pass"]
    spinning = [subprocess.Popen(spin, start_new_session=True) for _ in range(20)]
    yield
    for process in spinning:
        process.kill()
        process.wait(30.0)
    os.sched_setaffinity(0, before)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="Linux tells")
@pytest.mark.usefixtures("busy")
def test_a_call_has_its_time_on_a_busy_machine(tmp_path: Path) -> None:
    """A plugin that a run named was refused there, since its import took five seconds.

    One that hangs is ended all the same.
    """
    start = time.monotonic()
    answers = Contained({"works": call("works"), "hangs": call("hangs")}, 1.0).all()
    assert answers["works"].value == 1
    assert answers["hangs"].hung
    assert time.monotonic() - start > 1.0


@pytest.mark.parametrize("error", [FileNotFoundError, ProcessLookupError])
def test_a_process_that_ends_while_it_is_looked_at_has_no_memory(
    error: type[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor ended over it, and the call was blamed."""

    def gone(self: Path) -> str:
        raise error(self)

    monkeypatch.setattr(Path, "read_text", gone)
    assert resident_bytes(os.getpid()) == 0


def test_close_ends_calls_that_hang() -> None:
    hanging = Contained({"hangs": call("hangs"), "prints": call("prints")}, 1000.0)
    assert hanging.wait(0.2) == {}
    start = time.monotonic()
    hanging.close()
    assert time.monotonic() - start < 10
    assert hanging.pending == []


@pytest.mark.usefixtures("caller")
def test_an_answer_is_remembered_until_a_file_changes(calls: Path) -> None:
    question = {"a": Question(call("counts"), ("1",))}

    def ask() -> Answer:
        asked = Remembered("test.json", question, 30.0)
        while asked.pending:
            asked.wait()
        return asked.known["a"]

    assert [ask().value for _ in range(3)] == [1, 1, 1]
    calls.write_text(CALLS + "# changed\n")
    assert ask().value == 2
    question["a"] = Question(call("counts"), ("2",))
    assert ask().value == 3


@pytest.mark.usefixtures("caller")
def test_an_answer_is_of_the_sources_that_would_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two checkouts had one installation and one cache, and PYTHONPATH chose between
    them: the second got the plugins of the first.
    """
    question = {"a": Question(Call("contained_twice:f"), ("1",), package="contained_twice")}
    for value in (1, 2, 1):
        folder = tmp_path / f"checkout_{value}"
        folder.mkdir(exist_ok=True)
        (folder / "contained_twice.py").write_text(f"def f(): return {value}\n")
        monkeypatch.syspath_prepend(folder)
        asked = Remembered("test.json", question, 30.0)
        while asked.pending:
            asked.wait()
        assert asked.known["a"].value == value


@pytest.mark.usefixtures("caller")
def test_a_failure_is_remembered_until_something_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = {"a": Question(Call("contained_missing:f"), ("1",))}

    def ask() -> Remembered:
        asked = Remembered("test.json", question, 30.0)
        while asked.pending:
            asked.wait()
        return asked

    assert "No module named" in ask().known["a"].error
    assert ask().remembered == {"a"}
    (tmp_path / "contained_missing.py").write_text("def f(): return 7\n")
    assert ask().known["a"].value == 7

    question["a"] = Question(call("raises"), ("1",))
    assert ask().remembered == set()
    assert ask().remembered == {"a"}
    monkeypatch.setattr(remembered, "FAILED_S", 0.0)
    assert ask().remembered == set()


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:-5]),
        lambda file: file.write_bytes(file.read_bytes().replace(b"1", b"2")),
        lambda file: file.write_bytes(b"[" * 100000),
        lambda file: file.write_bytes(bytes(range(256))),
        lambda file: file.chmod(0o666),
        lambda file: (file.unlink(), file.mkdir()),
        lambda file: (file.unlink(), os.mkfifo(file)),
        lambda file: (file.rename(f"{file}.x"), file.symlink_to(f"{file}.x")),
        lambda file: file.parent.chmod(0o777),
    ],
)
def test_what_is_wrong_with_the_cache_is_no_cache(tmp_path: Path, damage: object) -> None:
    write_cached("test.json", {"a": 1})
    assert read_cached("test.json") == {"a": 1}
    file = tmp_path / "cache" / "coupler" / "test.json"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    damage(file)  # type: ignore[operator]
    assert read_cached("test.json") == {}


def test_no_home_and_no_place_are_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for place in (str(tmp_path / "file"), "/proc/nowhere", "relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", place)
        monkeypatch.setenv("HOME", str(tmp_path / "file"))
        write_cached("test.json", {"a": 1})
        assert read_cached("test.json") == {}


@pytest.mark.parametrize("entry", [7, {}, {"time": "x"}, {"time": 0, "error": "", "files": [7]}])
def test_an_entry_of_another_shape_is_asked_again(entry: object) -> None:
    question = Question(call("value", 1), ("1",))
    write_cached("test.json", {question.key: json.loads(json.dumps(entry))})
    assert Remembered("test.json", {"a": question}, 30.0).pending == ["a"]


def test_shapes() -> None:
    shape = {"a": [str], "b": {str: int}, "c": (str, [int])}
    good = {"a": ["x"], "b": {"y": 1}, "c": ["z", []]}
    assert fits(good, shape)
    for key, wrong in (("a", "x"), ("a", [1]), ("b", {"y": True}), ("b", []), ("c", ["z"])):
        assert not fits({**good, key: wrong}, shape)
    assert not fits({**good, "d": 1}, shape)
    assert not fits([], shape)
    for value in (None, "text", 7, {"a": 1}, [1], iter(lambda: "x", "")):
        with pytest.raises(WrongShape, match=r"^hook "):
            each_of("hook", value, str)


def test_metadata_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (metadata, points) in enumerate(
        [
            (b"", b"[coupler]\na = b\n"),
            ("Name: c\n".encode("utf-16"), b"[coupler]\na = b\n"),
            (b"Name: c\nVersion: 1\n", "[coupler]\na = b\n".encode("utf-16")),
            (b"Name: c\nVersion: 1\n", "[other]\na = b\n".encode("utf-16")),
        ]
    ):
        info = tmp_path / f"acme{number}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_bytes(metadata)
        (info / "entry_points.txt").write_bytes(points)
    assert "coupler-core" in installed()
    found = {e.distribution: e.problem for e in entries("coupler") if "acme" in e.distribution}
    assert found.keys() == {"acme0", "acme1", "acme2"}
    assert all(problem.startswith("its metadata cannot be read: ") for problem in found.values())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
