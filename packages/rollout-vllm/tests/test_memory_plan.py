"""What a replica holds, as ``coupler plan --memory`` asks it."""

from __future__ import annotations

import pytest

from coupler.engine_kit.memory_plan import GIB, Asked, total
from coupler.interfaces import Memory, Model
from coupler_rollout_vllm.config import VLLMConfig

NUMBERS = GIB  # 2 GiB of bf16


def asked(**facts: object) -> Asked:
    known = {"parameters": NUMBERS, "device_bytes": 80 * GIB, **facts}
    return Asked(path="rollout", model=Model("/m"), shape={}, **known)  # type: ignore[arg-type]


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
    assert needs.unknown == ("its activations, beside rollout.kv_cache_gib",)
    awake = VLLMConfig(kv_cache_gib=4.0, sleep_mode=False).memory_needs(asked())
    assert awake.held.keys() == {None}


def test_what_it_cannot_know() -> None:
    needs = VLLMConfig().memory_needs(asked(parameters=0, device_bytes=0))
    assert needs.unknown == (
        "its weights, since no engine counts them",
        "its KV cache: it takes 90% of a device (--device-gib)",
    )
