"""Run a function on several ranks: forked from one process that has imported everything, since that takes longest."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
DEADLINE_S = 280


def on_ranks(function: str, num_ranks: int, folder: Path, **arguments: Any) -> list[Arrays]:
    """Call ``module:function`` of this folder with a Rank and plain arguments; return what each rank returned."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    job = {"function": function, "ranks": num_ranks, "folder": str(folder), "port": port, "arguments": arguments}
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(job)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [dict(np.load(folder / f"{index}.npz")) for index in range(num_ranks)]


def _rank(job: dict[str, Any], index: int) -> None:
    from coupler.interfaces import Rank

    module, _, name = job["function"].partition(":")
    rank = Rank(index=index, world=job["ranks"], rendezvous=f"127.0.0.1:{job['port']}")
    found = getattr(import_module(module), name)(rank, **job["arguments"])
    np.savez(Path(job["folder"]) / f"{index}.npz", **found)
    import torch

    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main(job: dict[str, Any]) -> None:
    import_module(job["function"].partition(":")[0])
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(job, i)) for i in range(job["ranks"])]
    for process in ranks:
        process.start()
    while running := [process.sentinel for process in ranks if process.is_alive()]:
        multiprocessing.connection.wait(running)
        if any(process.exitcode for process in ranks):  # the others would wait for it
            for process in ranks:
                process.kill()
            sys.exit(1)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
