"""``rollout.quantization=fp8`` on the CPU, whose kernels vLLM has too: every update is
quantised anew, and the receipt counts what was sent.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from coupler.errors import WeightSyncError
from coupler.interfaces import Model, Request, SyncReceipt
from coupler.plugins.manager import Plugins
from coupler.testing.edge import Served
from coupler.testing.reference import TransformersReference
from coupler_rollout_vllm.config import VLLMConfig


@pytest.fixture(scope="module")
def fp8(reference: TransformersReference) -> Iterator[Served]:
    """Start a replica that quantises, with no weights yet."""
    from coupler_rollout_vllm.rollout import VLLMRollout

    rollout = VLLMRollout(VLLMConfig(quantization="fp8"), Model(str(reference.folder)))
    served = Served(rollout, Plugins.load().get("transport", "tcp"))
    yield served
    served.close()


def push(
    served: Served, reference: TransformersReference, factor: float = 1.0, without: str = ""
) -> SyncReceipt:
    sent = {n: (factor * torch.from_numpy(t)).bfloat16() for n, t in reference.tensors.items()}
    sent.pop(without, None)
    return served.push(iter(sent.items()))[1]


def differences(served: Served, reference: TransformersReference) -> list[float]:
    """Return the mean |log-prob difference| to fp32 for each of some requests."""
    requests = [Request((5, 6, 7 + i), 8, seed=i) for i in range(3)]
    found = []
    for request in requests:

        async def sample(request: Request = request) -> object:
            return await served.rollout.generate(request)

        done = served.run(sample)
        want = reference.logprobs_of(request.prompt, done.tokens, 1.0)
        found.append(float(np.abs(want - done.logprobs).mean()))
    return found


def test_every_update_is_quantised_and_counted(
    fp8: Served, reference: TransformersReference
) -> None:
    for factor in (0.5, 1.0, 1.0):
        receipt = push(fp8, reference, factor)
        assert receipt.num_received == receipt.num_loaded == len(reference.tensors)
        assert (receipt.missing, receipt.unexpected) == ((), ())
        assert receipt.dtype == "torch.float8_e4m3fn"
        found = differences(fp8, reference)
        assert max(found) < 0.3 if factor == 1.0 else min(found) > 0.5


def test_a_tensor_that_does_not_come_is_missing(
    fp8: Served, reference: TransformersReference
) -> None:
    name = next(name for name in reference.tensors if "k_proj.weight" in name)
    assert push(fp8, reference, without=name).missing == (name,)
    push(fp8, reference)
    assert max(differences(fp8, reference)) < 0.3


def test_another_shape_names_the_tensor(fp8: Served, reference: TransformersReference) -> None:
    name = next(name for name in reference.tensors if "k_proj.weight" in name)
    sent = {n: torch.from_numpy(t).bfloat16() for n, t in reference.tensors.items()}
    sent[name] = sent[name][:, :-16].contiguous()
    with pytest.raises(WeightSyncError, match=name):
        fp8.push(iter(sent.items()))
