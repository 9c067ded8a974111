"""Two model workers that share one copy of the weights: each loads its part, and one receipt covers both."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from coupler.interfaces import Request
from coupler.testing.edge import Served
from coupler.testing.reference import TransformersReference


@pytest.mark.parametrize("transport", ["nccl"])
def test_tensor_parallel_equals_the_reference(
    start: Callable[..., Served], reference: TransformersReference, transport: str
) -> None:
    served = start(transport, tensor_parallel=2)
    assert served.num_workers == 2
    weights = [(name, torch.from_numpy(tensor)) for name, tensor in reference.tensors.items()]
    for _ in range(2):
        sent, receipt = served.push(iter(weights))
        assert sent.num_tensors == receipt.num_received == receipt.num_loaded == len(weights)
        assert (receipt.missing, receipt.unexpected) == ((), ())
    request = Request((5, 6, 7), 12, 1.0, seed=1)
    done = served.run(lambda: served.rollout.generate(request))
    assert np.abs(reference.logprobs_of(request.prompt, done.tokens, 1.0) - done.logprobs).max() < 1e-3
    name = "model.layers.1.self_attn.v_proj.bias"
    _, receipt = served.push((n, t) for n, t in weights if n != name)
    assert receipt.missing == (name,)
