"""Run benchmarks side by side on the GPUs of one host, each with cores of its own.

    python benchmarks/lanes.py --limit 500 --out logs \
        "benchmarks/grpo_step.py --shape 1.5b" \
        "benchmarks/train_step.py; benchmarks/fp8.py --weights smollm2"

Each argument is a lane: commands for Python that run one after the other, on the GPU of
the lane's number and an equal share of this process's cores. What a lane prints goes to
a file of its own, of which the last lines are shown when all have ended. A command that
reaches the limit of its lane is ended with all that it started.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

SHOWN = 60


def commands_of(lane: str) -> list[list[str]]:
    """Return the arguments of each command of a lane."""
    lexer = shlex.shlex(lane, posix=True, punctuation_chars=";")
    lexer.whitespace_split = True
    parts = groupby(lexer, lambda word: word == ";")
    return [list(words) for parted, words in parts if not parted]


def run_lane(index: int, cores: list[int], lane: str, log: Path, limit: float) -> None:
    """Run the commands of a lane, each as long as the lane has time."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(index), "PYTHONUNBUFFERED": "1"}
    end = time.monotonic() + limit

    with log.open("w") as out:
        for command in commands_of(lane):
            start = time.monotonic()
            print(f"$ python {shlex.join(command)}", file=out, flush=True)
            process = subprocess.Popen(
                [sys.executable, *command],
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            os.sched_setaffinity(process.pid, cores)
            try:
                code = process.wait(max(end - start, 0))
            except subprocess.TimeoutExpired:
                code = "the limit"
            end_group(process)
            print(f"# {time.monotonic() - start:.0f} s, ended by {code}", file=out, flush=True)


def end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds of each lane")
    parser.add_argument("--out", type=Path, default=Path("lanes"), help="folder of the logs")
    parser.add_argument("lanes", nargs="+", help="commands, parted by a semicolon")
    given = parser.parse_args()

    given.out.mkdir(parents=True, exist_ok=True)
    cores, count = sorted(os.sched_getaffinity(0)), len(given.lanes)
    share = max(len(cores) // count, 1)
    logs = [given.out / f"lane{i}.log" for i in range(count)]

    running = []
    with ThreadPoolExecutor(count) as pool:
        for i, (lane, log) in enumerate(zip(given.lanes, logs, strict=True)):
            own = cores[i * share : (i + 1) * share] or cores
            running.append(pool.submit(run_lane, i, own, lane, log, given.limit))

    for each in running:
        each.result()
    for log in logs:
        print(f"== {log}", *log.read_text(errors="replace").splitlines()[-SHOWN:], sep="\n")


if __name__ == "__main__":
    main()
