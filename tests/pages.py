"""Read the pages of ``docs/``, and play those of ``docs/tasks`` as a user would.

A page is a script. Blocks with a title are files of its folder, and each line of a
block without a language is a command. Above a block of commands a comment may say how
they run.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TASKS = sorted((DOCS / "tasks").glob("*.md"))
FENCE = re.compile(r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?$')
MARKER = re.compile(r"^<!-- (?P<text>.*) -->$")
LINES = re.compile(r"\\\n\s*")
# The line beneath the title of a task.
COST = re.compile(r"^(\d+) commands, (\d+) minutes in an empty environment\.$", re.MULTILINE)
# Markers of a task: a server, and a run that dies.
GOES_ON, READY = "goes on", "; ready when it says: "
KILLED = "killed at its first checkpoint"
CHECKPOINT = "runs/*/checkpoints/step_*/MANIFEST.json"
LIMIT_S, END_S = 1800.0, 60.0


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    title: str
    marker: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Lines of a shell block, without comments and empty lines."""
        lines = LINES.sub(" ", self.text).splitlines()
        return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def blocks(page: Path) -> list[Block]:
    found, lines = [], page.read_text(encoding="utf-8").splitlines()
    start, marker, opened = 0, "", None
    for number, line in enumerate(lines):
        if opened is not None:
            if line == "```":
                text = "\n".join(lines[start + 1 : number]) + "\n"
                found.append(
                    Block(page, start + 1, opened["language"], opened["title"] or "", marker, text)
                )
                opened, marker = None, ""
        elif line.startswith("```"):
            opened, start = FENCE.match(line), number
            assert opened, f"{page.name}:{number + 1}: {line} is no fence that the checks know"
        elif line.strip():
            above = MARKER.match(line)
            marker = above["text"] if above else ""
    assert opened is None, f"{page.name} has an open block"
    return found


def commands(page: Path) -> list[str]:
    """Return the commands of a page, in their order."""
    return [each for block in blocks(page) if not block.language for each in block.commands]


@dataclass(frozen=True)
class Ran:
    """A command that ended well, goes on, or was killed as the page says.

    Attributes:
        seconds: until it ended, was ready or was killed.
        printed: what it wrote to both streams until then.
    """

    command: str
    seconds: float
    printed: str


def play(
    page: Path,
    folder: Path,
    environment: Mapping[str, str],
    changed: Callable[[str], str] = str,
) -> Iterator[Ran]:
    """Write the files of a page into ``folder``, and run its commands there, in order.

    Args:
        changed: what runs in the place of a command.

    Raises:
        AssertionError: a command failed, or took more than :data:`LIMIT_S`.
    """
    with ExitStack() as running:
        for block in blocks(page):
            if block.title:
                path = folder / block.title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text, encoding="utf-8")
            for number, command in enumerate(block.commands if not block.language else ()):
                started = time.monotonic()
                log = folder / f"printed-{block.line}-{number}.log"
                process = _start(changed(command), folder, environment, log)
                running.callback(end, process)

                until = _until(block.marker, folder, log)
                while not (ended := process.poll() is not None) and not until():
                    assert time.monotonic() < started + LIMIT_S, f"{block.place}: {command}"
                    time.sleep(0.05)
                if block.marker == KILLED:
                    end(process, signal.SIGKILL)
                printed = log.read_text(errors="replace")
                failed = process.returncode if not block.marker else ended
                assert not failed, f"{block.place}: {command}\n{printed[-6000:]}"
                yield Ran(command, time.monotonic() - started, printed)


def end(process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> None:
    """End a command that runs, and what it started in its session."""
    if process.poll() is not None:
        return
    for each in (number, signal.SIGKILL):
        with suppress(ProcessLookupError):
            # A server ends what it started, so the others are asked last.
            os.kill(process.pid, each) if each == number else os.killpg(process.pid, each)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)


def _start(
    command: str, folder: Path, environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            ["bash", "-c", f"exec env {command}"],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _until(marker: str, folder: Path, log: Path) -> Callable[[], bool]:
    """Return a function that tells whether the next command may run before this one
    has ended.
    """
    if marker == KILLED:
        return lambda: any(folder.glob(CHECKPOINT))
    if marker.startswith(GOES_ON):
        said = marker.partition(READY)[2]
        return lambda: said in log.read_text(errors="replace")
    assert not marker, f"no check knows the comment {marker}"
    return lambda: False
