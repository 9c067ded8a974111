"""Run a program for one episode, and read what it says of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from coupler import CouplerError, Outcome

TAIL = 65_536  # bytes of each stream that are kept, from the end
SHOWN = 2_000  # characters of a failed program's last words
CHUNK = 65_536
END_S = 10.0  # until the streams of a program that has ended are read


class ProgramFailed(CouplerError):
    """A program ended with another code than 0."""


async def run(
    command: Sequence[str], row: Mapping[str, Any], more: Mapping[str, str], timeout_s: float
) -> Outcome:
    """Run a program to its end.

    The program and all that it started in its session are killed when it has ended, or
    when this is cancelled.

    Args:
        row: what it reads from its standard input, as JSON.
        more: variables of its environment, beside those of this process.

    Raises:
        ProgramFailed: it ended with another code than 0, or cannot be started.
        TimeoutError: it ran longer than ``timeout_s``, or left a process behind that
            keeps its streams.
    """
    process = await _start(command, {**os.environ, **more})
    assert process.stdin and process.stdout and process.stderr
    streams = asyncio.gather(
        _last_of(process.stdout),
        _last_of(process.stderr),
        _feed(process.stdin, json.dumps(row).encode()),
    )

    try:
        code = await asyncio.wait_for(process.wait(), timeout_s)
        _kill(process)
        out, err, _ = await asyncio.wait_for(streams, END_S)
    finally:
        _kill(process)
        streams.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_S)

    if code:
        said = (err or out).decode("utf-8", "replace").strip()[-SHOWN:]
        raise ProgramFailed(f"environment.command {command[0]} ended with code {code}:\n{said}")
    return outcome_of(out.decode("utf-8", "replace"))


async def _start(command: Sequence[str], environment: Mapping[str, str]) -> Process:
    pipe = asyncio.subprocess.PIPE
    try:
        return await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
        )
    except OSError as error:
        raise ProgramFailed(
            f"environment.command {command[0]} cannot be started: {error}"
        ) from None


def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def outcome_of(text: str) -> Outcome:
    """Read the last line of a program: a number, or an object with ``reward`` and
    ``metrics``.

    Any other line says nothing of the reward, and ``reward.target`` scores the episode.
    """
    lines = text.strip().splitlines()
    try:
        last = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return Outcome()

    found: dict[str, Any] = last if isinstance(last, dict) else {"reward": last}
    reward, metrics = found.get("reward"), found.get("metrics")
    numbers = metrics if isinstance(metrics, dict) else {}
    read = {str(name): _number(value) for name, value in numbers.items()}
    return Outcome(_number(reward), metrics={name: n for name, n in read.items() if n is not None})


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        return None
    return float(value)


async def _feed(stdin: asyncio.StreamWriter, content: bytes) -> None:
    """Write all of the row. A program need not read it."""
    with suppress(BrokenPipeError, ConnectionResetError):
        stdin.write(content + b"\n")
        await stdin.drain()
        stdin.close()


async def _last_of(stream: asyncio.StreamReader) -> bytes:
    """Read a stream to its end, and return its last bytes."""
    kept = b""
    while chunk := await stream.read(CHUNK):
        kept = (kept + chunk)[-TAIL:]
    return kept
