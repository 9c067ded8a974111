"""What a replica holds, as ``coupler plan --memory`` asks it."""

from __future__ import annotations

from coupler.engine_kit.memory_plan import GIB, Asked, total
from coupler.interfaces import Memory, Model
from coupler_rollout_sglang.config import Mode, SGLangConfig

ASKED = Asked(path="rollout", model=Model("/m"), shape={}, parameters=GIB)


def test_the_budget_is_weights_and_cache() -> None:
    needs = SGLangConfig(gpu_memory_gib=20.0).memory_needs(ASKED)
    assert total(needs.held[Memory.WEIGHTS]) == 2 * GIB
    assert total(needs.held[Memory.KV_CACHE]) == 18 * GIB
    assert needs.unknown == ("its activations, and its graphs while it is awake",)


def test_a_cache_that_sglang_chooses_is_unknown() -> None:
    needs = SGLangConfig().memory_needs(ASKED)
    assert total(needs.held[Memory.KV_CACHE]) == 0
    assert needs.unknown[-1] == "its KV cache: with rollout.gpu_memory_gib=0 SGLang chooses"


def test_a_server_of_the_user_is_elsewhere() -> None:
    config = SGLangConfig(mode=Mode.SERVER, server="http://host:1")
    assert not config.memory_needs(ASKED).held
