"""What leaves the device and comes back is the same, and each byte is copied once.

On the CPU tensors leave their memory as they leave a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event, Timer
from typing import Any

import numpy as np
import pytest
from helpers import WANT, arrays, info, loss, make_batch, make_engine

from coupler.interfaces import EVERYTHING, Part
from coupler_engine_fsdp import moments, tensorfile
from coupler_engine_fsdp.config import FSDPConfig, OptimizerName
from coupler_engine_fsdp.engine import FSDPEngine

Folder = Callable[[str], Path]
TRAINED = frozenset({Part.PARAMS, Part.OPTIMIZER})
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


def same_weights(first: FSDPEngine, second: FSDPEngine) -> None:
    want, got = arrays(first.weights()), arrays(second.weights())
    for name, w in want.items():
        np.testing.assert_array_equal(got[name], w, err_msg=name)


def written(folder: Path) -> bytes:
    """Return the file that a save of one rank wrote."""
    (path,) = folder.glob("shard-*")
    return path.read_bytes()


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
    same_weights(still, moved)


@pytest.mark.parametrize("case", CASES)
def test_each_byte_is_copied_once_each_way(folder_of: Folder, case: str) -> None:
    """Nothing is allocated after the first time. What no step wrote to is not copied
    out again.
    """
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
        assert hand_over(engine) == moving + frozen
    steps(engine, moves=False)
    assert hand_over(engine) == 2 * moving + frozen
    assert engine._parked.allocated == allocated


@pytest.mark.parametrize("case", [*CASES, "adamw8bit"])
def test_the_first_step_leaves_for_memory_that_was_prepared(folder_of: Folder, case: str) -> None:
    """An engine that leaves before its first step prepares what the optimizer needs,
    and takes no memory for it on the device until then.
    """
    if case == "adamw8bit":
        pytest.importorskip("torchao")
    settings = {"adamw8bit": {"optimizer": "adamw8bit"}, **CASES}[case]
    still, moved = (make_engine(folder_of("qwen3"), **settings) for _ in range(2))
    hand_over(moved)
    moved._park(EVERYTHING)
    held, _ = moved._held(Part.OPTIMIZER)["optimizer"]
    assert held and not any(tensor.untyped_storage().nbytes() for tensor in held)

    moved._unpark(EVERYTHING)
    allocated = moved._parked.allocated
    for engine in (still, moved):
        steps(engine, moves=False)
    hand_over(moved)
    assert moved._parked.allocated == allocated
    assert allocated >= sum(tensor.untyped_storage().nbytes() for tensor in held)
    same_weights(still, moved)


@pytest.mark.parametrize("settings", [{"frozen": True}, {"offload_optimizer": True}])
def test_no_memory_is_prepared_that_nothing_leaves_for(
    folder_of: Folder, settings: dict[str, Any]
) -> None:
    engine = make_engine(folder_of("qwen3"), **settings)
    engine._park(frozenset({Part.OPTIMIZER}))
    assert engine._optimizer is None and not engine._parked.allocated


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_an_engine_that_leaves_is_its_copy_on_the_host(
    folder_of: Folder, tmp_path: Path, case: str
) -> None:
    """The next hand-over copies nothing out. One after a step waits for the disk."""
    still, moved = (make_engine(folder_of("qwen3"), **CASES[case]) for _ in range(2))
    steps(still, moves=False)
    still.save(tmp_path, TRAINED).wait(60)
    steps(moved, moves=True)
    allocated, before = moved._parked.allocated, moved._parked.copied

    (folder := tmp_path / "again").mkdir()
    save = moved.save(folder, TRAINED)
    out, back = moved._parked.copied - before, hand_over(moved)
    assert 0 < out <= back
    assert moved._parked.copied - before == out + back
    steps(moved, moves=True)
    assert save._done.done()
    assert written(folder) == written(tmp_path)
    assert moved._parked.allocated == allocated
    assert sum(tensor.numel() for tensor in moved._host.values()) < 1000


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
    same_weights(plain, away)


@pytest.mark.usefixtures("small_pieces")
def test_a_step_moves_moments_and_masters_once_each_way(folder_of: Folder) -> None:
    """Between steps none is on the device, and two pieces at most are at any time."""
    engine = make_engine(folder_of("qwen3"), offload_optimizer=True, dtype="bf16")
    steps(engine, moves=False)
    batch = make_batch()
    engine.forward_backward(batch, WANT, loss, info(batch, 2))
    pieces = engine._optimizer.moments.pieces
    tensors = [tensor for piece in pieces for tensor in piece.tensors]
    size = sum(shard.numel() for piece in pieces for shard in piece.shards.values())
    copied, allocated = engine._parked.copied, engine._parked.allocated

    most = 0
    for _ in engine._optimizer.moments.in_turn():
        here = [p for p in pieces if any(t.untyped_storage().nbytes() for t in p.tensors)]
        most = max(most, len(here))
    assert most == 2
    assert not any(t.untyped_storage().nbytes() for t in tensors)
    masters = {id(pair.master) for pair in engine.masters.pairs.values()}
    assert masters and masters <= {id(tensor) for tensor in tensors}
    assert 2 * 12 * size <= engine._parked.copied - copied < 2 * 12 * size + 100_000
    assert engine._parked.allocated == allocated


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False), (True, True)])
def test_a_checkpoint_does_not_say_where_moments_were(
    folder_of: Folder, tmp_path: Path, before: bool, after: bool, dtype: str
) -> None:
    first = make_engine(folder_of("qwen3"), offload_optimizer=before, dtype=dtype)
    steps(first, moves=False)
    first.save(tmp_path, TRAINED).wait(60)
    second = make_engine(folder_of("qwen3"), offload_optimizer=after, dtype=dtype)
    second.load(tmp_path, TRAINED)
    same_weights(first, second)

    batch = make_batch(seed=7)
    for engine in (first, second):
        engine.forward_backward(batch, WANT, loss, info(batch, 2))
        engine.step()
    same_weights(first, second)


@pytest.mark.usefixtures("small_pieces")
def test_a_save_reads_the_host_s_memory_before_a_step_writes_there(
    folder_of: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes no second copy, and has the numbers of before the step."""
    engine = make_engine(folder_of("qwen3"), offload_optimizer=True, dtype="bf16")
    steps(engine, moves=False)
    engine.save(tmp_path, TRAINED).wait(60)
    wanted = written(tmp_path)
    batch = make_batch(seed=7)
    engine.forward_backward(batch, WANT, loss, info(batch, 2))

    begun, go_on = Event(), Event()

    def slow(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return write(*args)

    write = tensorfile.write
    monkeypatch.setattr(tensorfile, "write", slow)
    (again := tmp_path / "again").mkdir()
    save = engine.save(again, TRAINED)
    assert begun.wait(60)
    Timer(0.2, go_on.set).start()
    engine.step()
    assert go_on.is_set()
    save.wait(60)
    assert written(again) == wanted
    own = sum(tensor.nbytes for tensor in engine._host.values())
    assert own < 0.01 * len(wanted)


@pytest.mark.usefixtures("small_pieces")
def test_a_step_goes_on_after_a_save_that_failed(folder_of: Folder, tmp_path: Path) -> None:
    engine = make_engine(folder_of("qwen3"), offload_optimizer=True, dtype="bf16")
    steps(engine, moves=False)
    save = engine.save(tmp_path / "absent", TRAINED)
    steps(engine, moves=False)
    with pytest.raises(FileNotFoundError):
        save.wait(60)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("sync_dtype", ["fp32", "bf16"])
def test_weights_that_a_rollout_gets_do_not_say_where_masters_are(
    folder_of: Folder, sync_dtype: str
) -> None:
    still, away = (
        make_engine(folder_of("qwen3"), offload_optimizer=o, dtype="bf16", sync_dtype=sync_dtype)
        for o in (False, True)
    )
    for engine in (still, away):
        steps(engine, moves=False)
    same_weights(still, away)


def test_masters_are_never_on_the_device_beside_a_rollout(folder_of: Folder) -> None:
    """A rollout samples before the first step, too. A frozen model has none."""
    engine = make_engine(folder_of("qwen3"), offload_optimizer=True, dtype="bf16")
    pairs = engine.masters.pairs.values()
    assert pairs and not any(pair.master.untyped_storage().nbytes() for pair in pairs)
    assert make_engine(folder_of("qwen3"), frozen=True, offload_optimizer=True)._optimizer is None


@pytest.mark.usefixtures("small_pieces")
def test_both_kinds_of_offload_together(folder_of: Folder) -> None:
    """What is in host memory already does not leave the device again."""
    settings = {"offload_optimizer": True, "dtype": "bf16"}
    still, moved = (make_engine(folder_of("qwen3"), **settings) for _ in range(2))
    steps(still, moves=False)
    steps(moved, moves=True)
    same_weights(still, moved)


@pytest.mark.parametrize("other", [{"ranks": 2}, {"optimizer": OptimizerName.MUON}])
def test_moments_in_host_memory_need_one_rank_and_adamw(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"engine\.offload_optimizer.*needs engine\.ranks=1"):
        FSDPConfig(offload_optimizer=True, **other)
