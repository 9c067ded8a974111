"""Run a function on several ranks, forked from one process that imports everything
once, since that takes longest.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
import traceback
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from coupler.engine_kit.rendezvous import keep_port

Arrays = dict[str, np.ndarray]
DEADLINE_S = 280


@cache
def _server() -> subprocess.Popen[str]:
    """Takes a job a line and answers with a line: empty, or what went wrong."""
    pipe = subprocess.PIPE
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=pipe, stdout=pipe, text=True, env=environment
    )
    atexit.register(process.kill)
    return process


def on_ranks(function: str, num_ranks: int, folder: Path, **arguments: Any) -> list[Arrays]:
    """Call ``module:function`` of this folder with a Rank and plain arguments; return
    what each rank returned.
    """
    port, kept = keep_port("127.0.0.1")
    folder.mkdir(parents=True, exist_ok=True)
    job = {
        "function": function,
        "ranks": num_ranks,
        "folder": str(folder),
        "port": port,
        "arguments": arguments,
    }
    with kept:
        server = _server()
        assert server.stdin and server.stdout
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        problem = json.loads(server.stdout.readline())
    assert not problem, problem
    return [dict(np.load(folder / f"{index}.npz")) for index in range(num_ranks)]


def _rank(job: dict[str, Any], index: int) -> None:
    import torch

    from coupler.interfaces import Rank

    module, _, name = job["function"].partition(":")
    rank = Rank(index=index, world=job["ranks"], rendezvous=f"127.0.0.1:{job['port']}")
    try:
        found = getattr(import_module(module), name)(rank, **job["arguments"])
    except Exception:
        Path(job["folder"], "problem.txt").write_text(traceback.format_exc())
        raise
    np.savez(Path(job["folder"]) / f"{index}.npz", **found)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _run(job: dict[str, Any]) -> str:
    """Fork the ranks and wait; what went wrong, if anything did."""
    import_module(job["function"].partition(":")[0])
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(job, i)) for i in range(job["ranks"])]
    for process in ranks:
        process.start()
    while running := [process.sentinel for process in ranks if process.is_alive()]:
        # the others would wait for one that died
        if any(process.exitcode for process in ranks):
            break
        if not multiprocessing.connection.wait(running, DEADLINE_S):
            break
    for process in ranks:
        process.kill()
        process.join()
    if not any(process.exitcode for process in ranks):
        return ""
    problem = Path(job["folder"], "problem.txt")
    return (
        problem.read_text()
        if problem.exists()
        else f"a rank died, or took more than {DEADLINE_S} s"
    )


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ranks print is no answer
    for line in sys.stdin:
        answers.write(json.dumps(_run(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
