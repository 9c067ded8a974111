"""What a replica holds, as ``coupler plan --memory`` asks it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coupler.engine_kit.memory_plan import GIB, Asked, Phase, total
from coupler.interfaces import Memory, Model
from coupler_rollout_sglang.config import Mode, SGLangConfig

SHAPE = {"hidden_size": 1536, "intermediate_size": 8960, "vocab_size": 151936}
ASKED = Asked(path="rollout", model=Model("/m"), shape=SHAPE, parameters=GIB)


def test_the_budget_is_weights_and_cache() -> None:
    needs = SGLangConfig(gpu_memory_gib=20.0).memory_needs(ASKED)
    assert total(needs.held[Memory.WEIGHTS]) == 2 * GIB
    assert total(needs.held[Memory.KV_CACHE]) == 18 * GIB
    assert not needs.unknown


@pytest.mark.parametrize(
    ("gib", "chunked", "tokens"),
    [(16, True, 2048), (80, True, 8192), (80, False, 16384), (192, True, 16384), (0, True, 16384)],
)
def test_a_pass_computes_the_tokens_of_a_chunk(gib: int, chunked: bool, tokens: int) -> None:
    """A GPU whose memory is not known may be a large one."""
    asked = replace(ASKED, device_bytes=gib * GIB)
    config = SGLangConfig(kv_cache_gib=8.0, chunked_prefill=chunked, enforce_eager=True)
    activations = total(config.memory_needs(asked).peaks[Phase.SAMPLING])
    layer, logits = 2 * tokens * (3 * 8960 + 4 * 1536), 3 * 4 * 256 * 151936
    assert activations == layer + logits


@pytest.mark.parametrize("chunked", [True, False])
def test_graphs_keep_the_tensors_of_a_chunk_while_sglang_sleeps(chunked: bool) -> None:
    """A prompt in one piece is computed without a graph, and gives its tensors back."""
    graphs, eager = (
        SGLangConfig(kv_cache_gib=8.0, enforce_eager=eager, chunked_prefill=chunked).memory_needs(
            ASKED
        )
        for eager in (False, True)
    )
    kept = total(graphs.held[None]) - total(eager.held[None])
    passing, whole = total(graphs.peaks[Phase.SAMPLING]), total(eager.peaks[Phase.SAMPLING])
    assert (kept > whole) == chunked
    assert (passing < whole) == chunked


def test_a_plan_is_near_what_was_measured() -> None:
    """GiB of an H200 that SGLang 0.5.17 had in use at 1.5B (docs/measurements.md)."""
    asked = replace(ASKED, parameters=1_543_714_304, device_bytes=140 * GIB)
    needs = SGLangConfig(kv_cache_gib=8.0).memory_needs(asked)
    held = sum(map(total, needs.held.values()))
    assert held + total(needs.peaks[Phase.SAMPLING]) == pytest.approx(13.1 * GIB, rel=0.05)
    assert total(needs.held[None]) == pytest.approx(2.02 * GIB, rel=0.05)


def test_on_the_cpu_there_are_no_graphs() -> None:
    needs = SGLangConfig().memory_needs(replace(ASKED, gpu=False))
    assert not needs.peaks and not needs.unknown and total(needs.held[None]) == 0


def test_a_cache_that_sglang_chooses_is_unknown() -> None:
    needs = SGLangConfig().memory_needs(ASKED)
    assert total(needs.held[Memory.KV_CACHE]) == 0
    assert needs.unknown[-1] == "its KV cache: with rollout.gpu_memory_gib=0 SGLang chooses"


def test_a_server_of_the_user_is_elsewhere() -> None:
    config = SGLangConfig(mode=Mode.SERVER, server="http://host:1")
    assert not config.memory_needs(ASKED).held
