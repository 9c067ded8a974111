"""An engine that was prepared waits with its imports done, and ends where nobody needs
it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from coupler.interfaces import Model, Rank
from coupler.testing.reference import TransformersReference
from coupler_rollout_vllm.config import VLLMConfig
from coupler_rollout_vllm.rollout import VLLMRollout
from coupler_rollout_vllm.starting import Starting

IMPORTS_S, ENDS_S = 300.0, 30.0
OWNER = """
import asyncio, sys, time
from coupler.interfaces import Model, Rank
from coupler_rollout_vllm.config import VLLMConfig
from coupler_rollout_vllm.rollout import VLLMRollout

if __name__ == "__main__":
    rollout = VLLMRollout(VLLMConfig(), Model(sys.argv[1]))
    asyncio.run(rollout.prepare(Rank(seed=1)))
    print("gate", rollout.starting.gate.name, flush=True)
    time.sleep(600)
"""


def holders(gate: str) -> set[int]:
    """Return the processes that have a gate open, without its owner."""
    found = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            path = os.readlink(descriptor)
            # the owner has it open for writing
            mode = (descriptor.parents[1] / "fdinfo" / descriptor.name).read_text()
        except OSError:
            continue
        if path.removesuffix(" (deleted)") == gate and mode.split()[3][-1] == "0":
            found.add(int(descriptor.parts[2]))
    return found


def waiting_at(gate: str) -> set[int]:
    end = time.monotonic() + IMPORTS_S
    while not (found := holders(gate)):
        assert time.monotonic() < end, "no model worker came to the gate"
        time.sleep(0.1)
    return found


def await_end(workers: set[int]) -> None:
    """Wait until these processes are gone, or are ended and unreaped."""
    end = time.monotonic() + ENDS_S
    lines = [Path(f"/proc/{pid}/cmdline") for pid in workers]
    while any(line.exists() and line.read_bytes() for line in lines):
        assert time.monotonic() < end
        time.sleep(0.1)


def prepared(reference: TransformersReference) -> tuple[VLLMRollout, Starting]:
    rollout = VLLMRollout(VLLMConfig(max_model_len=256), Model(str(reference.folder)))
    asyncio.run(rollout.prepare(Rank(seed=1)))
    assert rollout.starting
    return rollout, rollout.starting


def test_a_prepared_engine_ends_when_its_replica_closes(reference: TransformersReference) -> None:
    """It may close before a worker has come to the gate, too."""
    rollout, starting = prepared(reference)
    workers = waiting_at(starting.gate.name)
    assert not starting.engine.done()
    rollout.close()
    await_end(workers)

    rollout, starting = prepared(reference)
    rollout.close()
    assert starting.engine.exception(IMPORTS_S)
    assert not Path(starting.gate.name).exists()


def test_a_prepared_engine_ends_with_the_process_that_started_it(
    reference: TransformersReference, tmp_path: Path
) -> None:
    (tmp_path / "owner.py").write_text(OWNER)
    command = [sys.executable, str(tmp_path / "owner.py"), str(reference.folder)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert owner.stdout
    line = next(line for line in owner.stdout if line.startswith("gate"))
    workers = waiting_at(line.split()[1])

    owner.send_signal(signal.SIGKILL)
    await_end(workers)
    owner.wait(ENDS_S)
    Path(line.split()[1]).unlink()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_prepared_engine_leaves_the_device_alone(reference: TransformersReference) -> None:
    free = torch.cuda.mem_get_info()[0]
    rollout, starting = prepared(reference)
    waiting_at(starting.gate.name)
    assert torch.cuda.mem_get_info()[0] == free
    rollout.close()
