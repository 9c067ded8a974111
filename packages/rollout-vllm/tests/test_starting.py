"""An engine that was prepared waits with its imports done, and ends where nobody needs
it.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coupler.interfaces import Model, Rank
from coupler.testing.gates import await_end, waiting_at
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
    print("gate", rollout.starting.gate.path, flush=True)
    time.sleep(600)
"""


def prepared(reference: TransformersReference) -> tuple[VLLMRollout, Starting]:
    rollout = VLLMRollout(VLLMConfig(max_model_len=256), Model(str(reference.folder)))
    asyncio.run(rollout.prepare(Rank(seed=1)))
    assert rollout.starting
    return rollout, rollout.starting


def test_a_prepared_engine_ends_when_its_replica_closes(reference: TransformersReference) -> None:
    """It may close before a worker has come to the gate, too."""
    rollout, starting = prepared(reference)
    workers = waiting_at(starting.gate.path)
    assert not starting.engine.done()
    rollout.close()
    await_end(workers)

    rollout, starting = prepared(reference)
    rollout.close()
    assert starting.engine.exception(IMPORTS_S)
    assert not Path(starting.gate.path).exists()


@pytest.mark.slow
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
    assert not Path(line.split()[1]).exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_prepared_engine_leaves_the_device_alone(reference: TransformersReference) -> None:
    free = torch.cuda.mem_get_info()[0]
    rollout, starting = prepared(reference)
    waiting_at(starting.gate.path)
    assert torch.cuda.mem_get_info()[0] == free
    rollout.close()
