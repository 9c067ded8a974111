"""Weights of a mixture of experts: one tensor per expert comes in, and vLLM runs them
fused.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coupler.errors import WeightSyncError
from coupler.interfaces import Completion, Model, Request
from coupler.loop.transfer import verify
from coupler.plugins.manager import Plugins
from coupler.testing.edge import Served
from coupler.testing.models import write_qwen3_moe
from coupler.testing.reference import TransformersReference
from coupler_rollout_vllm.config import Precision, VLLMConfig
from coupler_rollout_vllm.rollout import VLLMRollout

REQUESTS = [Request((5, 6 + i, 7), 24, seed=i) for i in range(4)]
EXPERT = "model.layers.1.mlp.experts.2."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def experts(folder: Path) -> TransformersReference:
    return TransformersReference(write_qwen3_moe(folder / "first", seed=0))


@pytest.fixture(scope="module")
def others(folder: Path) -> TransformersReference:
    """The same model with other weights everywhere."""
    return TransformersReference(write_qwen3_moe(folder / "second", seed=1))


@pytest.fixture(scope="module")
def mixture(experts: TransformersReference) -> Iterator[Served]:
    config = VLLMConfig(dtype=Precision.FP32)
    served = Served(
        VLLMRollout(config, Model(str(experts.folder))), Plugins.load().get("transport", "tcp")
    )
    yield served
    served.close()


def push(served: Served, reference: TransformersReference, without: str = "nothing") -> Any:
    """Send the checkpoint's tensors but those whose name begins with ``without``;
    return both receipts.
    """
    kept = {
        name: tensor for name, tensor in reference.tensors.items() if not name.startswith(without)
    }
    return served.push((name, torch.from_numpy(tensor)) for name, tensor in kept.items())


def error(served: Served, reference: TransformersReference) -> float:
    """Of the log-probs of what is sampled now, in nats."""

    async def together() -> list[Completion]:
        return await asyncio.gather(*map(served.rollout.generate, REQUESTS))

    differences = [
        np.abs(
            reference.logprobs_of(request.prompt, done.tokens, request.temperature) - done.logprobs
        ).max()
        for request, done in zip(REQUESTS, served.run(together), strict=True)
    ]
    return float(max(differences))


def test_every_expert_arrives_with_each_update(
    mixture: Served, experts: TransformersReference, others: TransformersReference
) -> None:
    for weights, replaced in ((experts, others), (others, experts), (experts, others)):
        sent, receipt = push(mixture, weights)
        verify(sent, receipt, 0)
        assert receipt.num_loaded == sent.num_tensors == len(weights.tensors)
        assert error(mixture, weights) < 1e-3 < 1e-1 < error(mixture, replaced)


@pytest.mark.parametrize("without", [EXPERT, f"{EXPERT}up_proj", "model.layers.0.mlp.gate."])
def test_an_expert_that_does_not_come_is_missed(
    mixture: Served, experts: TransformersReference, without: str
) -> None:
    absent = tuple(sorted(name for name in experts.tensors if name.startswith(without)))
    assert len(absent) == (3 if without == EXPERT else 1)
    sent, receipt = push(mixture, experts, without)
    assert receipt.missing == absent
    with pytest.raises(
        WeightSyncError, match=f"{len(absent)} of its parameters got nothing, first: {absent[0]}"
    ):
        verify(sent, receipt, 0)
    push(mixture, experts)
    assert error(mixture, experts) < 1e-3


def test_an_expert_that_is_too_small_is_refused(
    mixture: Served, experts: TransformersReference
) -> None:
    """vLLM would copy what there is of it."""
    name = f"{EXPERT}down_proj.weight"
    tensors = {**experts.tensors, name: np.ascontiguousarray(experts.tensors[name][:, 1:])}
    with pytest.raises(WeightSyncError, match=re.escape(name)):
        mixture.push((name, torch.from_numpy(tensor)) for name, tensor in tensors.items())
    push(mixture, experts)
    assert error(mixture, experts) < 1e-3
