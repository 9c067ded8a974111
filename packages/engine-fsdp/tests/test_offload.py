"""What leaves the device and comes back is the same, and each byte is copied once.

On the CPU tensors leave their memory as they leave a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import WANT, arrays, info, loss, make_batch, make_engine

from coupler.interfaces import EVERYTHING, Part
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
