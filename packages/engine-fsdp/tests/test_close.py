"""Engines leave their process group: the last one destroys it, and a broken group does
not hang.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import WANT, make_batch, make_engine

from coupler.engine_kit.rendezvous import keep_port
from coupler.errors import CouplerError
from coupler.interfaces import Rank

Folder = Callable[[str], Path]
HERE = Path(__file__).parent
EXIT_S = 180.0  # imports on a busy machine included; torch would wait for half an hour

ENGINES = """
import sys
from pathlib import Path
import torch.distributed as dist
from helpers import WANT, make_batch, make_engine

folder, count = Path(sys.argv[1]), int(sys.argv[2])
engines = [make_engine(folder) for _ in range(count)]
for engine in engines:
    engine.forward(make_batch(), WANT)
for left in reversed(range(count)):
    engines[left].close()
    engines[left].close()
    assert dist.is_initialized() == (left > 0), left
"""

PEER_GOES = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
from coupler.interfaces import Rank
from helpers import WANT, make_batch, make_engine

how, index = sys.argv[3], int(sys.argv[4])
engine = make_engine(Path(sys.argv[1]), Rank(index=index, world=2, rendezvous=sys.argv[2]))
engine.forward(make_batch(), WANT)
if index == 1:
    print("ready", flush=True)
    if how == "dies":
        os._exit(0)
    sys.stdin.read()  # silent until the other has gone
    os._exit(0)
if how == "dies":
    try:
        for _ in range(100):
            engine.forward(make_batch(), WANT)
    except Exception as error:
        print("raised", type(error).__name__, flush=True)
else:
    import threading
    threading.Thread(target=engine.forward, args=(make_batch(), WANT), daemon=True).start()
    time.sleep(2)
start = time.monotonic()
engine.close()
print("closed", time.monotonic() - start, flush=True)
"""


def command(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


@pytest.fixture
def environment() -> dict[str, str]:
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("count", [1, 2])
def test_the_last_engine_of_a_process_destroys_its_group(
    folder_of: Folder, environment: dict[str, str], count: int
) -> None:
    """On a GPU, torch warns of a group that is left to the end of its process."""
    run = command(ENGINES, folder_of("qwen2"), count)
    done = subprocess.run(
        run, env=environment, capture_output=True, text=True, timeout=EXIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "destroy_process_group" not in done.stderr


DIES = pytest.param(
    "dies",
    marks=pytest.mark.skipif(
        torch.cuda.is_available(), reason="NCCL tells nobody that a peer died: waits do"
    ),
)
# where NCCL is, the one above does not run
SILENT = () if torch.cuda.is_available() else pytest.mark.slow


@pytest.mark.parametrize("how", [DIES, pytest.param("stays silent", marks=SILENT)])
def test_an_engine_closes_after_its_collective_failed(
    folder_of: Folder, environment: dict[str, str], how: str
) -> None:
    port, kept = keep_port("127.0.0.1")
    rendezvous = f"127.0.0.1:{port}"
    pipe, folder = subprocess.PIPE, folder_of("qwen2")
    ranks = [
        subprocess.Popen(
            command(PEER_GOES, folder, rendezvous, how, index),
            env={**environment, "NCCL_HOSTID": str(index)},  # two ranks may share a GPU
            stdin=pipe, stdout=pipe, stderr=pipe, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    try:
        start = time.monotonic()
        out, errors = ranks[0].communicate(timeout=EXIT_S)
        assert "closed" in out, errors
        assert ranks[0].returncode == 0, errors
        assert ("raised" in out) == (how == "dies")
        assert time.monotonic() - start < EXIT_S
    finally:
        kept.close()
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_a_process_runs_another_engine_after_one_that_is_closed(folder_of: Folder) -> None:
    """The next engine makes a group of its own in the same process."""
    first = make_engine(folder_of("qwen2"))
    want = first.forward(make_batch(), WANT)["logprobs"]
    first.close()
    second = make_engine(folder_of("qwen2"))
    np.testing.assert_array_equal(second.forward(make_batch(), WANT)["logprobs"], want)
    second.close()


def test_a_group_that_an_engine_found_stays(folder_of: Folder) -> None:
    """Whoever made it, a rollout say, ends it."""
    if torch.distributed.is_initialized():  # left by a test before
        torch.distributed.destroy_process_group()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(
        backend, store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        engine = make_engine(folder_of("qwen2"))
        engine.close()
        assert torch.distributed.is_initialized()
        with pytest.raises(CouplerError, match="runs in a process that is already rank 0 of 1"):
            make_engine(folder_of("qwen2"), Rank(index=1, world=2))
    finally:
        torch.distributed.destroy_process_group()
