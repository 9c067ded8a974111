"""Check what every tracker must do: keep the numbers of a run in its folder, and forget
those that a resumed run repeats.
"""

from __future__ import annotations

import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from coupler.errors import CouplerError, PluginError
from coupler.interfaces import Tracker
from coupler.system.files import writing
from coupler.testing.recorded import holds
from coupler.testing.subject import Subject

# Text keeps these few digits, and float32 is exact.
KEPT, FORGOTTEN, LATER = 27182.5, 31415.5, 16180.5
ODD = {  # names that a user's metrics or a plugin's may have
    "reward/mean": 0.5,
    "time/a b": 1.0,
    "Belohnung/größe": 2.0,
    'it\'s "quoted", with commas; and; more': 3.0,
    "a=b%s{}\\n": 4.0,
    "step": 5.0,
    "value": 6.0,
    "../../outside": 7.0,
    "x" * 200: 8.0,
    "": 9.0,
}
EXTREME = {
    "nan": float("nan"),
    "inf": float("inf"),
    "minus_inf": float("-inf"),
    "large": 1e308,
    "tiny": 5e-324,
}
SAMPLES = [
    {
        "step": 1, "group": 4, "trajectory": 0, "row": 7, "data_source": None,
        "prompt": "what | is\n\t2 + 2?", "completion": completion, "reward": 0.5,
        "reward_parts": {"format": 1.0}, "advantage": advantage, "finish": "stop", "tokens": 3,
        "version": [0, 0], "turns": [{"origin": "prompt", "text": "what"}],
    }
    for completion, advantage in (("größe \x00 <b>4</b>", -0.5), ("", None))
]  # fmt: skip
MANY = {f"train_infer/replica_{i}": float(i) for i in range(2000)}
RUN, CONFIG = "0123456789abcdef", {"engine": {"name": "toy", "lr": 0.1}, "steps": 2}
SLOW_S = 1.0  # of the fastest of a few calls
FULL = 4096  # bytes, of a file on a disk that is full

Open = Callable[[], Tracker]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def start(tracker_subject: Subject, run_dir: Path) -> Iterator[Open]:
    """Make the tracker as a run does, when it starts and again when it is resumed. Each
    tracker ends with the test.
    """
    made: list[Tracker] = []

    def make() -> Tracker:
        try:
            made.append(tracker_subject.backend.load()(tracker_subject.config(), run_dir))
            made[-1].start(RUN, CONFIG)
        except PluginError as error:
            if tracker_subject.selected:
                raise
            pytest.skip(str(error).splitlines()[0])
        return made[-1]

    yield make
    for tracker in made:
        with suppress(Exception):  # the test has judged it, and may have closed it
            tracker.close()


def readable(subject: Subject, run_dir: Path, number: float = KEPT) -> None:
    """Skip where the kit cannot read what the tracker keeps."""
    if not holds(run_dir, number):
        pytest.skip(f"{subject} keeps no file in which the kit finds a number")


@pytest.mark.parametrize("case", ["odd names", "not finite", "many", "none"])
def test_whatever_is_logged_is_taken(start: Open, case: str) -> None:
    values: Mapping[str, float] = {
        "odd names": ODD,
        "not finite": EXTREME,
        "many": MANY,
        "none": {},
    }[case]
    tracker = start()

    for step in (0, 1):
        try:
            tracker.log(step, {**values, "run/steps": 2.0})
        except Exception as error:
            raise AssertionError(
                f"expected log() to take {case}, came {type(error).__name__}: {error}"
            ) from error

    tracker.close()


@pytest.mark.parametrize("how", ["done", "interrupted", "it failed: größe = 5"])
def test_what_else_a_run_gives_is_taken(start: Open, run_dir: Path, how: str) -> None:
    """Samples, a picture and the end of the run."""
    picture = run_dir / "reward.png"
    picture.write_bytes(_png(3, 2))
    tracker = start()
    tracker.log(0, {"reward/mean": KEPT})

    try:
        tracker.samples(1, SAMPLES)
        tracker.log(1, {"reward/mean": LATER})
        tracker.picture("reward", picture)
        tracker.ended(how)
    except Exception as error:
        raise AssertionError(
            f"expected samples, picture and end to be taken, came {type(error).__name__}: {error}"
        ) from error
    tracker.close()


def _png(width: int, height: int) -> bytes:
    """Make a black picture."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checked = name + content
        return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress((b"\0" + b"\0\0\0" * width) * height)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def test_numbers_beside_odd_ones_are_kept(
    tracker_subject: Subject, start: Open, run_dir: Path
) -> None:
    tracker = start()
    tracker.log(0, {"reward/mean": KEPT})
    tracker.log(1, {**ODD, **EXTREME, "reward/mean": LATER})
    tracker.close()
    readable(tracker_subject, run_dir)
    assert holds(run_dir, LATER), (
        f"expected reward/mean={LATER} of step 1 beside odd names and NaN, it is not there"
    )


def test_names_come_and_go(tracker_subject: Subject, start: Open, run_dir: Path) -> None:
    """An evaluation logs its numbers at some steps only, and steps may be left out."""
    tracker = start()
    tracker.log(0, {"reward/mean": KEPT})
    tracker.log(3, {"reward/mean": 1.5, "eval/reward": LATER})
    tracker.log(4, {"loss": FORGOTTEN})
    tracker.close()
    readable(tracker_subject, run_dir)
    for name, number in (("eval/reward", LATER), ("loss", FORGOTTEN)):
        assert holds(run_dir, number), (
            f"expected {name}={number}, which steps before did not have; it is not there"
        )


def test_a_run_that_logs_nothing_closes(start: Open) -> None:
    start().close()


@pytest.mark.parametrize("done", [1, -1])
def test_a_rewind_forgets_what_comes_after(
    tracker_subject: Subject, start: Open, run_dir: Path, done: int
) -> None:
    """A resumed run makes the tracker anew and rewinds it, to -1 where the run starts
    from the beginning.
    """
    first = start()
    if done >= 0:
        first.log(done, {"reward/mean": KEPT})
    first.log(done + 1, {"reward/mean": FORGOTTEN, "eval/reward": FORGOTTEN})
    first.close()
    readable(tracker_subject, run_dir, FORGOTTEN)
    # A resumed run is later, and TensorBoard orders its files by the second
    time.sleep(1.1)

    resumed = start()
    resumed.rewind(done)
    resumed.log(done + 1, {"reward/mean": LATER})
    resumed.close()

    assert not holds(run_dir, FORGOTTEN), (
        f"expected {FORGOTTEN} of step {done + 1} to be forgotten by rewind({done})"
    )
    assert holds(run_dir, LATER), (
        f"expected {LATER} of step {done + 1}, logged after rewind({done}); it is not there"
    )
    kept = done < 0 or holds(run_dir, KEPT)
    assert kept, f"expected {KEPT} of step {done} to outlive rewind({done}), it is not there"


def test_a_rewind_of_nothing_is_none(start: Open) -> None:
    """A run that ended before its first step is rewound to -1."""
    tracker = start()
    tracker.rewind(-1)
    tracker.log(0, {"reward/mean": KEPT})
    tracker.close()


def test_it_writes_under_the_run_folder_alone(
    start: Open, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's folder is all that a user copies, deletes or mounts."""
    folders = {"HOME": tmp_path / "home", "TMPDIR": tmp_path / "tmp", "PWD": tmp_path / "here"}
    for name, folder in folders.items():
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.chdir(folders["PWD"])

    tracker = start()
    tracker.log(0, ODD)
    tracker.rewind(-1)
    tracker.log(0, {"reward/mean": KEPT})
    tracker.close()

    written = [
        path for path in tmp_path.rglob("*") if path.is_file() and run_dir not in path.parents
    ]
    assert not written, (
        "expected files in run_dir alone, came "
        f"{[str(path.relative_to(tmp_path)) for path in written]}"
    )


def test_logging_does_not_block(start: Open) -> None:
    """Every step waits for it."""
    tracker, took = start(), []
    for step in range(3):
        begun = time.monotonic()
        tracker.log(step, dict(list(MANY.items())[:100]))
        took.append(time.monotonic() - begun)
    assert min(took) < SLOW_S, (
        f"expected log() to return within {SLOW_S} s, it took {min(took):.1f} s"
    )


# A writer's thread may end of it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_ends_in_a_sentence(tracker_subject: Subject, start: Open) -> None:
    """Core makes one of an ``OSError``. A library's own exception has to become one, or
    a ``CouplerError``.
    """
    tracker = start()

    try:
        with _full_disk(), writing(f"the numbers of {tracker_subject}"):
            for step in range(100):
                tracker.log(step, dict(list(MANY.items())[:50]))
            tracker.close()
    except CouplerError:
        return
    except Exception as error:
        raise AssertionError(
            "expected OSError or CouplerError where the disk is full, came "
            f"{type(error).__name__}: {error}"
        ) from error


@contextmanager
def _full_disk() -> Iterator[None]:
    """Let no file of this process grow above ``FULL`` bytes: writing more raises an
    ``OSError``.
    """
    resource = pytest.importorskip("resource")  # Windows limits no file
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Numbers that text and float32 keep, of each sign and size.
EXACT = (27182.5, -31415.5, 0.0009765625, 123456.0, 16180.5)
STEPS = (130, 131)  # no buffer of several steps is emptied at the end of both


@pytest.mark.parametrize("steps", STEPS)
def test_every_number_of_every_step_is_kept(
    tracker_subject: Subject, start: Open, run_dir: Path, steps: int
) -> None:
    """A run is long, its numbers are of any size, and the last step counts as well."""
    tracker = start()
    for step in range(steps):
        tracker.log(step, {"reward/mean": 1000.5 + step, "batch/sequences": 8.0})
    for step, number in enumerate(EXACT):
        tracker.log(steps + step, {"loss": number})
    tracker.close()
    files = [path for path in run_dir.rglob("*") if path.is_file() and path.suffix != ".lock"]
    empty = [path.name for path in files if not path.stat().st_size]
    assert not empty, f"expected numbers in {empty[0]} after close(), it is empty"

    wanted = [*(1000.5 + step for step in range(steps)), *EXACT]
    if not any(holds(run_dir, number) for number in (8.0, *wanted)):
        pytest.skip(f"{tracker_subject} keeps no file in which the kit finds a number")
    lost = [number for number in wanted if not holds(run_dir, number)]
    assert not lost, f"expected {len(wanted)} numbers to be kept, {len(lost)} are lost: {lost[:4]}"


def test_values_are_left_alone(start: Open) -> None:
    """Every tracker of a run gets the same mapping."""
    values = {"reward/mean": 0.123456789, "loss": 2.5, **EXTREME}
    before = list(values.items())
    tracker = start()
    for step in range(3):
        tracker.log(step, values)
    tracker.close()
    changed = repr(list(values.items())) != repr(before)
    assert not changed, f"expected log() to leave {before} alone, it became {values}"
