"""What leaves the device and comes back is the same, and each byte is copied once.

On the CPU tensors leave their memory as they leave a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import WANT, arrays, info, loss, make_batch, make_engine

from coupler.interfaces import EVERYTHING, Part
from coupler_engine_fsdp import moments
from coupler_engine_fsdp.config import FSDPConfig, OptimizerName
from coupler_engine_fsdp.engine import FSDPEngine

Folder = Callable[[str], Path]
CASES = {
    "fp32": {},
    "masters": {"dtype": "bf16"},
    "micro-batches": {"dtype": "bf16", "max_tokens_per_gpu": 64},
    "muon": {"optimizer": "muon", "dtype": "bf16"},
    "lora": {"lora_rank": 4, "dtype": "bf16"},
}


def hand_over(engine: FSDPEngine) -> int:
    """Move everything out and in, and return the bytes that were copied."""
    before = engine._parked.copied
    engine._park(EVERYTHING)
    held = [each.untyped_storage().nbytes() for each in engine.policy.parameters()]
    assert not any(held)
    engine._unpark(EVERYTHING)
    return engine._parked.copied - before


def steps(engine: FSDPEngine, moves: bool) -> None:
    for index in range(2):
        batch = make_batch(seed=index)
        if moves:
            hand_over(engine)
        engine.forward_backward(batch, WANT, loss, info(batch, index))
        if moves:
            hand_over(engine)
        engine.step()


@pytest.mark.parametrize("case", CASES)
def test_a_hand_over_changes_no_bit(folder_of: Folder, case: str) -> None:
    still, moved = (make_engine(folder_of("qwen3"), **CASES[case]) for _ in range(2))
    steps(still, moves=False)
    steps(moved, moves=True)
    want, got = arrays(still.weights()), arrays(moved.weights())
    for name, w in want.items():
        np.testing.assert_array_equal(got[name], w, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_each_byte_is_copied_once_each_way(folder_of: Folder, case: str) -> None:
    """Nothing is allocated after the first time. Frozen weights are copied out once."""
    engine = make_engine(folder_of("qwen3"), **CASES[case])
    steps(engine, moves=False)
    sizes = {
        name: sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())
        for part in (Part.PARAMS, Part.OPTIMIZER)
        for name, (held, _) in engine._held(part).items()
    }
    moving, frozen = sizes["params"] + sizes["optimizer"], sizes["frozen"]
    assert moving and bool(frozen) == (case == "lora")

    assert hand_over(engine) == 2 * moving + 2 * frozen
    allocated = engine._parked.allocated
    assert moving + frozen <= allocated < 1.2 * (moving + frozen) + (64 << 10)
    for _ in range(3):
        assert hand_over(engine) == 2 * moving + frozen
    assert engine._parked.allocated == allocated


def test_the_host_s_copy_of_a_frozen_model_is_not_used_after_a_load(
    folder_of: Folder, tmp_path: Path
) -> None:
    other = make_engine(folder_of("qwen3"))
    other.save(tmp_path, frozenset({Part.PARAMS})).wait(60)
    engine = make_engine(folder_of("qwen3"), frozen=True)
    once, again = hand_over(engine), hand_over(engine)
    assert once == 2 * again > 0

    engine.load(tmp_path, frozenset({Part.PARAMS}))
    assert not engine._parked._known


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "PIECE", 10_000)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("case", ["fp32", "masters", "micro-batches", "lora"])
def test_moments_in_host_memory_change_no_bit(folder_of: Folder, case: str) -> None:
    plain = make_engine(folder_of("qwen3"), **CASES[case])
    away = make_engine(folder_of("qwen3"), offload_optimizer=True, **CASES[case])
    for engine in (plain, away):
        steps(engine, moves=False)
    assert len(away._optimizer.moments.pieces) > 1 or case == "lora"
    want, got = arrays(plain.weights()), arrays(away.weights())
    for name, w in want.items():
        np.testing.assert_array_equal(got[name], w, err_msg=name)


@pytest.mark.usefixtures("small_pieces")
def test_a_step_moves_each_moment_once_each_way(folder_of: Folder) -> None:
    """Between steps none is on the device, and two pieces at most are at any time."""
    engine = make_engine(folder_of("qwen3"), offload_optimizer=True, dtype="bf16")
    steps(engine, moves=False)
    batch = make_batch()
    engine.forward_backward(batch, WANT, loss, info(batch, 2))
    pieces = engine._optimizer.moments.pieces
    size = sum(shard.numel() for piece in pieces for shard in piece.shards.values())
    copied, allocated = engine._parked.copied, engine._parked.allocated

    most = 0
    for _ in engine._optimizer.moments.in_turn():
        here = [p for p in pieces if any(t.untyped_storage().nbytes() for t in p.tensors)]
        most = max(most, len(here))
    assert most == 2
    assert not any(t.untyped_storage().nbytes() for p in pieces for t in p.tensors)
    assert 2 * 8 * size <= engine._parked.copied - copied < 2 * 8 * size + 100_000
    assert engine._parked.allocated == allocated


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False), (True, True)])
def test_a_checkpoint_does_not_say_where_moments_were(
    folder_of: Folder, tmp_path: Path, before: bool, after: bool
) -> None:
    first = make_engine(folder_of("qwen3"), offload_optimizer=before)
    steps(first, moves=False)
    first.save(tmp_path, frozenset({Part.PARAMS, Part.OPTIMIZER})).wait(60)
    second = make_engine(folder_of("qwen3"), offload_optimizer=after)
    second.load(tmp_path, frozenset({Part.PARAMS, Part.OPTIMIZER}))

    batch = make_batch(seed=7)
    for engine in (first, second):
        engine.forward_backward(batch, WANT, loss, info(batch, 2))
        engine.step()
    want, got = arrays(first.weights()), arrays(second.weights())
    for name, w in want.items():
        np.testing.assert_array_equal(got[name], w, err_msg=name)


@pytest.mark.usefixtures("small_pieces")
def test_both_kinds_of_offload_together(folder_of: Folder) -> None:
    """What is in host memory already does not leave the device again."""
    settings = {"offload_optimizer": True, "dtype": "bf16"}
    still, moved = (make_engine(folder_of("qwen3"), **settings) for _ in range(2))
    steps(still, moves=False)
    steps(moved, moves=True)
    want, got = arrays(still.weights()), arrays(moved.weights())
    for name, w in want.items():
        np.testing.assert_array_equal(got[name], w, err_msg=name)


@pytest.mark.parametrize("other", [{"ranks": 2}, {"optimizer": OptimizerName.MUON}])
def test_moments_in_host_memory_need_one_rank_and_adamw(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"engine\.offload_optimizer.*needs engine\.ranks=1"):
        FSDPConfig(offload_optimizer=True, **other)
