"""One GPU: fused attention, mixed precision, memory that comes back. Skipped without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import CONFIGS, WANT, arrays, closeness, info, loss, make_batch, make_engine, reference, worst

from coupler.interfaces import EVERYTHING, Part

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
Folder = Callable[[str], Path]


@pytest.mark.parametrize("name", CONFIGS)
def test_fp32_equals_plain_transformers(folder_of: Folder, name: str) -> None:
    batch = make_batch()
    outputs, grads = reference(folder_of(name))
    engine = make_engine(folder_of(name), dtype="fp32", max_tokens_per_gpu=64)
    np.testing.assert_allclose(engine.forward(batch, WANT)["logprobs"], outputs["logprobs"], atol=5e-5)
    engine.forward_backward(batch, WANT, loss, info(batch))
    assert worst(arrays(engine.gradients()), grads) < 5e-5


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "mistral"])  # by the fused kernel; its heads are too narrow for it
def test_bf16_through_fused_attention_is_near_fp32(folder_of: Folder, name: str, checkpointing: bool) -> None:
    batch = make_batch()
    outputs, grads = reference(folder_of(name))
    engine = make_engine(folder_of(name), max_tokens_per_gpu=64, gradient_checkpointing=checkpointing)
    assert np.abs(engine.forward(batch, WANT)["logprobs"] - outputs["logprobs"]).mean() < 0.05
    engine.forward_backward(batch, WANT, loss, info(batch))
    got = arrays(engine.gradients())
    assert closeness(got, grads) > 0.99
    assert {tensor.dtype for _, tensor in engine.weights()} == {torch.bfloat16}


def test_offload_frees_the_device_and_changes_nothing(folder_of: Folder) -> None:
    batch = make_batch()
    results = []
    for moves in (False, True):
        engine = make_engine(folder_of("qwen3"), lr=1e-2)
        size = sum(4 * p.numel() for p in engine.policy.parameters())
        for index in range(3):
            if moves:
                held = torch.cuda.memory_allocated()
                engine.offload(EVERYTHING)
                assert {p.device.type for p in engine.policy.parameters()} == {"cpu"}
                assert held - torch.cuda.memory_allocated() >= size * (3 if index else 1)
                engine.onload(EVERYTHING)
            engine.forward_backward(batch, WANT, loss, info(batch, index))
            if moves:
                engine.offload(frozenset({Part.OPTIMIZER}))
                engine.onload(frozenset({Part.OPTIMIZER}))
            engine.step()
        results.append(arrays(engine.weights()))
    assert worst(results[1], results[0]) < 1e-2  # the fused kernel's backward is not deterministic


def test_a_checkpoint_continues(folder_of: Folder, tmp_path: Path) -> None:
    batch = make_batch()
    engine = make_engine(folder_of("qwen2"), lr=1e-2)
    engine.forward_backward(batch, WANT, loss, info(batch))
    engine.step()
    engine.save(tmp_path, EVERYTHING)
    resumed = make_engine(folder_of("qwen2"), lr=1e-2)
    resumed.load(tmp_path, EVERYTHING)
    np.testing.assert_array_equal(resumed.forward(batch, WANT)["logprobs"], engine.forward(batch, WANT)["logprobs"])
    assert {v.device.type for s in resumed._optimizer.adamw.state.values() for v in s.values()} == {"cuda"}
