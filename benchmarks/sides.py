"""Sides of a comparison that start together, each in a process of its own, and are
measured in turns.

A start of an inference engine takes a minute, which is not measured: so all start at
once, say when they are ready, and measure when they are told to, one at a time.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

READY, ANSWER = "SIDE READY", "SIDE ANSWER "


class Side:
    """The caller's end: a process that runs the same script with ``arguments``."""

    def __init__(self, script: str, *arguments: str) -> None:
        self.name = " ".join(arguments)
        self.begun = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def ready(self) -> Side:
        """Wait until it has started."""
        self._read(READY)
        seconds = time.perf_counter() - self.begun
        print(f"[{self.name}] ready after {seconds:.0f} s", file=sys.stderr, flush=True)
        return self

    def measure(self) -> dict[str, Any]:
        """Let it measure once, and tell what it found: nothing is lost if the script is
        cut off.
        """
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        answer = self._read(ANSWER)
        print(f"[{self.name}] {answer}", end="", file=sys.stderr, flush=True)
        return json.loads(answer)

    def close(self) -> None:
        """Let it end, and wait for it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(300)

    def _read(self, start: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line.removeprefix(start)
            sys.stderr.write(f"[{self.name}] {line}")
        raise SystemExit(f"{self.name} ended with {self.process.wait()} before it answered")


def free_port() -> int:
    """Return a port of the loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def spread(values: list[float]) -> str:
    """Return the median, the least and the most."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def serve(measure: Callable[[], dict[str, Any]]) -> None:
    """The process's end: measure as often as it is asked."""
    print(READY, flush=True)
    for _ in sys.stdin:
        print(ANSWER + json.dumps(measure()), flush=True)


class Paced:
    """The process's end where what it does goes on by itself, a step each time that it
    is asked. Call it with what to answer after each step.
    """

    def __init__(self) -> None:
        self.out = sys.stdout
        self.started = False

    def __call__(self, found: Mapping[str, Any]) -> None:
        answer = ANSWER + json.dumps(dict(found)) if self.started else READY
        self.started = True
        print(answer, file=self.out, flush=True)
        sys.stdin.readline()
