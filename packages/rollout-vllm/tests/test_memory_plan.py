"""What a replica holds, as ``coupler plan --memory`` asks it."""

from __future__ import annotations

import pytest

from coupler.engine_kit.memory_plan import GIB, Asked, Phase, total
from coupler.interfaces import Memory, Model
from coupler_rollout_vllm.config import VLLMConfig

NUMBERS = GIB  # 2 GiB of bf16


def asked(**facts: object) -> Asked:
    known = {"parameters": NUMBERS, "device_bytes": 80 * GIB, "shape": {}, **facts}
    return Asked(path="rollout", model=Model("/m"), **known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "gib"), [({}, 72), ({"gpu_memory_gib": 20.0}, 20), ({"tensor_parallel": 2}, 72)]
)
def test_it_takes_its_budget(settings: dict, gib: float) -> None:
    needs = VLLMConfig(**settings).memory_needs(asked())
    assert total(term for terms in needs.held.values() for term in terms) == gib * GIB
    weights = 2 * GIB // settings.get("tensor_parallel", 1)
    assert total(needs.held[Memory.WEIGHTS]) == weights
    assert not needs.unknown


def test_weights_and_cache_sleep() -> None:
    needs = VLLMConfig(kv_cache_gib=4.0, quantization="fp8").memory_needs(asked())
    assert total(needs.held[Memory.WEIGHTS]) == GIB
    assert total(needs.held[Memory.KV_CACHE]) == 4 * GIB
    assert not needs.unknown
    awake = VLLMConfig(kv_cache_gib=4.0, sleep_mode=False).memory_needs(asked())
    assert awake.held.keys() == {None}


def test_beside_a_cache_of_its_own_size_it_takes_activations() -> None:
    """Within a budget they are part of it."""
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 1 << 15}
    its = {"max_sequences": 128, "max_batched_tokens": 8192}
    both = [
        VLLMConfig(**its, kv_cache_gib=4.0).memory_needs(asked(shape=shape)),  # type: ignore[arg-type]
        VLLMConfig(**its, gpu_memory_gib=20.0).memory_needs(asked(shape=shape)),  # type: ignore[arg-type]
    ]
    widest, logits = 2 * 8192 * (3 * 4096 + 4 * 1024), 3 * 4 * 128 * (1 << 15)
    found = [total(needs.peaks.get(Phase.SAMPLING, ())) for needs in both]
    assert found == [widest + logits, 0]


def test_what_it_cannot_know() -> None:
    needs = VLLMConfig().memory_needs(asked(parameters=0, device_bytes=0))
    assert needs.unknown == (
        "its weights, since no engine counts them",
        "its KV cache: it takes 90% of a device (--device-gib)",
    )
