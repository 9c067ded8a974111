"""Memory of weights that no step changes: 2 bytes of each in bf16, no fp32 master."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import WANT, info, loss, make_batch, make_engine, parameter_bytes

Folder = Callable[[str], Path]


@pytest.mark.parametrize("model", ["qwen2", "qwen3", "experts"])
def test_lora_has_masters_of_the_adapter_alone(folder_of: Folder, model: str) -> None:
    engine = make_engine(folder_of(model), dtype="bf16", lora_rank=4, lr=1e-2)
    adapter = sum(p.numel() for p in engine.adapter.parameters().values())
    frozen = sum(tensor.numel() for tensor in engine.named.values())
    want = {"torch.bfloat16": 2 * (frozen + adapter), "torch.float32": 4 * adapter}
    assert parameter_bytes(engine) == want

    batch = make_batch()
    engine.forward_backward(batch, WANT, loss, info(batch))
    assert engine.step().applied
    assert parameter_bytes(engine) == want, "a step makes no masters of what does not train"


@pytest.mark.parametrize("model", ["qwen2", "qwen3", "experts"])
def test_a_reference_takes_two_bytes_a_parameter(folder_of: Folder, model: str) -> None:
    frozen = make_engine(folder_of(model), dtype="bf16", frozen=True)
    trained = make_engine(folder_of(model), dtype="bf16")
    count = sum(tensor.numel() for tensor in frozen.named.values())
    assert parameter_bytes(frozen) == {"torch.bfloat16": 2 * count}
    assert sum(parameter_bytes(trained).values()) == 6 * count

    got, want = (engine.forward(make_batch(), WANT)["logprobs"] for engine in (frozen, trained))
    np.testing.assert_array_equal(got, want)


def test_a_reference_in_fp32_is_the_model(folder_of: Folder) -> None:
    frozen, trained = (make_engine(folder_of("qwen2"), frozen=f) for f in (True, False))
    got, want = (engine.forward(make_batch(), WANT)["logprobs"] for engine in (frozen, trained))
    np.testing.assert_array_equal(got, want)
