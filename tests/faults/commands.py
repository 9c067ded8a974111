"""Run commands in forks of one process, within limits of time and memory.

The process imports what a command imports before it looks at its options. A fork costs
a few milliseconds then, and tells what it imported, made and started itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_S = 60
MEMORY_BYTES = 6 << 30
SUBREAPER = 36
# Longer answers than this hide what they say.
MAX_ANSWER = 4000
# Imported before the forks. None of them imports torch.
LIGHT = ("coupler.cli", "coupler.config.compose", "coupler.jobs", "coupler.testing.toy")
HEAVY = (
    *LIGHT,
    "pyarrow.parquet",
    "transformers.modeling_utils",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
    "transformers.models.auto.tokenization_auto",
    "accelerate",
    "psutil",
    "coupler.testing.reference",
    "numpy.testing",
)


@dataclass(frozen=True, slots=True)
class Ended:
    """Holds what a command did."""

    code: int | None
    text: str
    raised: str
    # Seconds of processor that the fork took.
    seconds: float
    # The most memory that it held beyond what every fork has.
    grown_bytes: int
    imported_torch: bool
    made: list[str]
    started: list[str]
    left: int

    @property
    def complaint(self) -> list[str]:
        """Return the lines of the error, without the messages before it."""
        lines = self.text.splitlines()
        starts = [
            i
            for i, line in enumerate(lines)
            if line.startswith("coupler: ") and not line.startswith("coupler: warning: ")
        ]
        return lines[starts[-1] :] if starts else []

    def problem(self) -> str:
        """Return why this is neither a success nor a sentence, or an empty text."""
        if self.raised:
            return self.raised
        if self.code not in (0, 2):
            return f"it ends with {self.code}"
        if "Traceback" in self.text:
            return "a traceback"
        if self.left:
            return f"{self.left} processes outlive it"
        if self.code == 2 and not self.complaint:
            return "no sentence"
        if self.code == 2 and len("\n".join(self.complaint)) > MAX_ANSWER:
            return "an answer that is too long"
        if self.code == 2 and not all(line.startswith("  ") for line in self.complaint[1:]):
            return "an answer of several sentences without an order"
        return ""


class Commands:
    """Keeps the process that forks."""

    def __init__(self, imports: Sequence[str] = LIGHT, cwd: Path = ROOT, **env: str) -> None:
        settings = {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.commands", *imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=cwd,
            env={**os.environ, **settings, "PYTHONPATH": path, **env},
        )

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait(LIMIT_S)
        self.process.stdout.close()

    def run(self, *given: str, limit_s: float = LIMIT_S, strict: bool = False) -> Ended:
        """Run ``coupler`` with these arguments.

        ``strict`` ends a command that imports torch or starts a process, at that point.
        """
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps([given, limit_s, strict]).encode() + b"\n")
        self.process.stdin.flush()
        return Ended(**json.loads(self.process.stdout.readline()))


def serve() -> None:
    """Fork for each line of arguments that comes, and answer with a line."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)

    for line in sys.stdin.buffer:
        given, limit_s, strict = json.loads(line)
        with tempfile.TemporaryFile() as output:
            found = _forked(given, limit_s, strict, output.fileno())
            output.seek(0)
            found["text"] = output.read(1 << 20).decode("utf-8", "replace")
        answers.write(json.dumps(found).encode() + b"\n")
        answers.flush()


def _forked(given: list[str], limit_s: float, strict: bool, output: int) -> dict[str, Any]:
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)
        _child(given, strict, output, writes)
    os.close(writes)

    found, end = b"", time.monotonic() + limit_s
    while time.monotonic() < end and select.select([reads], [], [], end - time.monotonic())[0]:
        if not (part := os.read(reads, 1 << 16)):
            break
        found += part
    else:
        os.kill(child, signal.SIGKILL)
    os.close(reads)
    _, status, used = os.wait4(child, 0)
    said = json.loads(found) if found else {}
    ended = "it hangs" if time.monotonic() >= end else f"it ends with status {status}"
    base = {"code": None, "raised": ended, "imported_torch": False, "made": [], "started": []}
    return {
        **base,
        "grown_bytes": 0,
        **said,
        "seconds": used.ru_utime + used.ru_stime,
        "left": _reap(),
    }


def _reap() -> int:
    """Return how many processes outlive a command by more than two seconds, and end
    them.
    """
    end = time.monotonic() + 2
    while time.monotonic() < end:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.02)
        except ChildProcessError:
            return 0
    left = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for process in left:
        os.kill(int(process), signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    return len(left)


def _reads_plugins() -> bool:
    """Tell a process that reads installed plugins, which is no worker."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:
        if frame.f_code.co_filename.endswith("coupler/system/contained.py"):
            return True
    return False


def _child(given: list[str], strict: bool, output: int, writes: int) -> None:
    """Run the command, tell the pipe what it did, and end this process."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES + _mapped(), resource.RLIM_INFINITY))
    made: list[str] = []
    started: list[str] = []

    def note(event: str, values: tuple[Any, ...]) -> None:
        if event == "os.mkdir" and len(made) < 99:
            made.append(str(values[0]))
        starts = event in ("subprocess.Popen", "os.fork", "os.posix_spawn") and not _reads_plugins()
        if starts and len(started) < 99:
            started.append(f"{event} {str(values)[:200]}")
        if strict and (starts or (event == "import" and values[0] == "torch")):
            said = {"made": made, "started": started, "imported_torch": not starts}
            os.write(writes, json.dumps({**said, "code": 2, "raised": ""}).encode())
            os._exit(0)

    sys.addaudithook(note)

    code, raised = None, ""
    try:
        from coupler.cli import main

        code = main(given)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        raised = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()

    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held
    said = {
        "code": code,
        "raised": raised,
        "imported_torch": "torch" in sys.modules,
        "made": made,
        "started": started,
        "grown_bytes": 1024 * grown,
    }
    os.write(writes, json.dumps(said).encode())
    os._exit(0)


def _mapped() -> int:
    """Return the address space that this process has already."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    serve()
