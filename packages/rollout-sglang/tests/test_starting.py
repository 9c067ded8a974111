"""An engine that was prepared waits with its imports done, and ends where nobody needs
it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from coupler.interfaces import Model, Rank
from coupler.testing.gates import await_end, waiting_at
from coupler.testing.reference import TransformersReference
from coupler_rollout_sglang.config import SGLangConfig
from coupler_rollout_sglang.links import PrivateLink
from coupler_rollout_sglang.rollout import SGLangRollout


def prepared(reference: TransformersReference) -> tuple[SGLangRollout, PrivateLink]:
    rollout = SGLangRollout(SGLangConfig(max_model_len=256), Model(str(reference.folder)))
    asyncio.run(rollout.prepare(Rank(seed=1)))
    assert rollout.prepared
    return rollout, rollout.prepared


def test_a_prepared_engine_ends_when_its_replica_closes(reference: TransformersReference) -> None:
    rollout, link = prepared(reference)
    workers = waiting_at(link.gate.path)
    rollout.close()
    await_end({*workers, link.process.of.pid})
    assert not Path(link.gate.path).exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_prepared_engine_leaves_the_device_alone(reference: TransformersReference) -> None:
    free = torch.cuda.mem_get_info()[0]
    rollout, link = prepared(reference)
    waiting_at(link.gate.path)
    assert torch.cuda.mem_get_info()[0] == free
    rollout.close()
