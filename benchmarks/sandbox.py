"""Time the sandbox: a fresh interpreter for each program, and calls of one episode.

``python benchmarks/sandbox.py`` keeps to one core with all that it starts, and prints
programs per second by the clock, with machine, versions and command. What else runs on
that core makes the figures worse. The third row has a bubblewrap for each program,
as on a kernel that allows no namespaces inside bubblewrap.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from coupler.rewards.sandbox import version
from coupler_agents.sandbox import Sandbox, SandboxLimits

PROGRAM = "import math\nprint(sum(math.isqrt(n) for n in range(1000)))"
SECONDS = 20.0


async def fresh(sandbox: Sandbox, number: int, together: int) -> None:
    """Run programs, each in an interpreter of its own."""
    left = iter(range(number))

    async def one_after_another() -> None:
        for _ in left:
            interpreter = await sandbox.interpreter(apart=True)
            ran = await interpreter.run(PROGRAM, SECONDS, {}, "")
            if ran.code or not ran.stdout:
                raise SystemExit(f"a program failed: {ran}")

    await asyncio.gather(*(one_after_another() for _ in range(together)))


async def calls(sandbox: Sandbox, number: int, together: int) -> None:
    """Run programs in as many interpreters as run at once."""

    async def episode() -> None:
        interpreter = await sandbox.interpreter()
        for _ in range(number // together):
            await interpreter.call(PROGRAM, SECONDS)
        await interpreter.close()

    await asyncio.gather(*(episode() for _ in range(together)))


async def timed(
    work: Callable[[Sandbox, int, int], Awaitable[None]], number: int, together: int, apart: bool
) -> tuple[float, float]:
    """Return the seconds that programs took, and the first of them."""
    sandbox = Sandbox(SandboxLimits(), separate=not apart)
    began = time.perf_counter()
    await sandbox.start()
    started = time.perf_counter()
    await work(sandbox, number, together)
    done = time.perf_counter()
    await sandbox.close()
    return done - started, started - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=600)
    parser.add_argument("--together", type=int, default=8, help="interpreters at once")
    given = parser.parse_args()

    print(f"command: python benchmarks/sandbox.py {' '.join(sys.argv[1:])}".rstrip())
    print(f"machine: {os.cpu_count()} x {_processor()}, load {os.getloadavg()[0]:.1f}")
    print(f"versions: Python {platform.python_version()}, {version()}, Linux {platform.release()}")
    print(f"{'':40}{'ms each':>8}{'programs/s/core':>17}{'start ms':>10}")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    for name, work, number, apart in (
        ("a fresh interpreter for each program", fresh, given.programs, False),
        ("calls of one episode", calls, 10 * given.programs, False),
        ("a fresh bubblewrap for each program", fresh, given.programs // 10, True),
    ):
        seconds, start = asyncio.run(timed(work, number, given.together, apart))
        rate = number / seconds
        print(f"{name:40}{1000 / rate:8.2f}{rate:17.0f}{1000 * start:10.0f}")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ")[1] for line in lines if "model name" in line), platform.machine())


if __name__ == "__main__":
    main()
