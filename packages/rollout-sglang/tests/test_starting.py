"""An engine that was prepared waits with its imports done, and ends where nobody needs
it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from coupler.errors import ReplicaDied
from coupler.interfaces import Model, Rank
from coupler.testing.gates import await_end, waiting_at
from coupler.testing.reference import TransformersReference
from coupler_rollout_sglang.config import Mode, SGLangConfig
from coupler_rollout_sglang.links import PrivateLink
from coupler_rollout_sglang.rollout import SGLangRollout
from coupler_rollout_sglang.wire import Wire

OWNER = """
import asyncio, sys, time
from coupler.interfaces import Model, Rank
from coupler_rollout_sglang.config import SGLangConfig
from coupler_rollout_sglang.rollout import SGLangRollout

rollout = SGLangRollout(SGLangConfig(), Model(sys.argv[1]))
asyncio.run(rollout.prepare(Rank(seed=1)))
print("gate", rollout.prepared.gate.path, flush=True)
time.sleep(600)
"""

DIES_WITH_ITS_OWNER = """
import sys
from coupler.errors import CouplerError
from coupler_rollout_sglang import host

def prepared(asked):
    sys.stdin.read()
    raise CouplerError("the engine died")

host.prepared, host.LOOK_S = prepared, 600
host.main()
"""


def prepared(reference: TransformersReference) -> tuple[SGLangRollout, PrivateLink]:
    rollout = SGLangRollout(SGLangConfig(max_model_len=256), Model(str(reference.folder)))
    asyncio.run(rollout.prepare(Rank(seed=1)))
    assert rollout.prepared
    return rollout, rollout.prepared


@pytest.mark.slow
def test_a_prepared_engine_ends_when_its_replica_closes(reference: TransformersReference) -> None:
    rollout, link = prepared(reference)
    workers = waiting_at(link.gate.path)
    rollout.close()
    await_end({*workers, link.process.of.pid})
    assert not Path(link.gate.path).exists()


@pytest.mark.parametrize("waits", [True, False])
def test_a_prepared_engine_leaves_nothing_when_the_process_that_started_it_is_killed(
    reference: TransformersReference, tmp_path: Path, waits: bool
) -> None:
    """It may be killed before a worker has come to the gate, too."""
    (tmp_path / "owner.py").write_text(OWNER)
    (place := tmp_path / "place").mkdir()
    owner = subprocess.Popen(
        [sys.executable, str(tmp_path / "owner.py"), str(reference.folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(place)},
    )
    assert owner.stdout
    line = next(line for line in owner.stdout if line.startswith("gate"))
    workers = waiting_at(line.split()[1]) if waits else set[int]()

    owner.kill()
    owner.wait()
    await_end(workers)
    until = time.monotonic() + 30
    while left := list(place.iterdir()):
        assert time.monotonic() < until, left
        time.sleep(0.1)


def test_an_engine_that_dies_of_its_owner_s_end_leaves_no_folder(tmp_path: Path) -> None:
    """It may notice before the look at whether the owner lives."""
    (folder := tmp_path / "sockets").mkdir()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        host = subprocess.Popen(
            [sys.executable, "-c", DIES_WITH_ITS_OWNER, str(theirs.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        Wire(ours).send({"parent": os.getpid(), "folder": str(folder)})
    host.communicate(timeout=200)
    assert not folder.exists()


def test_an_engine_that_was_killed_before_it_started_is_named(
    reference: TransformersReference,
) -> None:
    rollout, link = prepared(reference)
    os.kill(link.process.of.pid, signal.SIGKILL)
    with pytest.raises(ReplicaDied, match="SGLang died while it started"):
        asyncio.run(rollout.setup(Rank(seed=1)))
    rollout.close()


def test_a_server_ends_whose_start_is_called_off(reference: TransformersReference) -> None:
    config = SGLangConfig(mode=Mode.SERVER)
    rollout = SGLangRollout(config, Model(str(reference.folder)))
    mine = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")

    async def story() -> set[int]:
        before = set(mine.read_text().split())
        starting = asyncio.create_task(rollout.setup(Rank(seed=1)))
        while not (started := set(mine.read_text().split()) - before):
            await asyncio.sleep(0.01)
        starting.cancel()
        await asyncio.wait({starting})
        rollout.close()
        return {int(pid) for pid in started}

    await_end(asyncio.run(story()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_prepared_engine_leaves_the_device_alone(reference: TransformersReference) -> None:
    free = torch.cuda.mem_get_info()[0]
    rollout, link = prepared(reference)
    waiting_at(link.gate.path)
    assert torch.cuda.mem_get_info()[0] == free
    rollout.close()
