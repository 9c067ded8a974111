"""Checkpoint files: what is in them, and what becomes of damaged ones. Other world
sizes are in test_ranks.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import make_engine
from safetensors import safe_open

from coupler.errors import CouplerError, WaitTimeout
from coupler.interfaces import EVERYTHING, Part
from coupler.system.hashing import hash_files
from coupler_engine_fsdp import checkpoint
from coupler_engine_fsdp.engine import FSDPEngine

Folder = Callable[[str], Path]
SHARD = "shard-00000-of-00001.safetensors"


@pytest.fixture
def engine(folder_of: Folder) -> FSDPEngine:
    return make_engine(folder_of("qwen3"))


@pytest.fixture
def saved(engine: FSDPEngine, tmp_path: Path) -> Path:
    engine.save(tmp_path, EVERYTHING).wait(60)
    return tmp_path


def test_files_are_json_and_safetensors_that_others_read(engine: FSDPEngine, saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == ["index.json", SHARD]
    json.loads((saved / "index.json").read_text())
    with safe_open(saved / SHARD, "pt") as file:
        for name, tensor in engine.named.items():
            assert torch.equal(file.get_tensor(f"params/{name}"), tensor), name
        assert f"optimizer/{name}/exp_avg" in set(file.keys())


def test_a_save_hashes_what_it_writes(engine: FSDPEngine, tmp_path: Path) -> None:
    hashes = engine.save(tmp_path, EVERYTHING).wait(60)
    assert hashes == dict(
        zip(hashes, hash_files([tmp_path / name for name in hashes]), strict=True)
    )
    assert sorted(hashes) == sorted(path.name for path in tmp_path.iterdir())


def test_every_dtype_and_shape_comes_back(tmp_path: Path, engine: FSDPEngine) -> None:
    made = {str(dtype): torch.arange(6).reshape(3, 2).to(dtype) for dtype in checkpoint.DTYPES} | {
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "odd": torch.ones(3, dtype=torch.int8),
    }
    checkpoint.save(tmp_path, made, engine.mesh, {}).wait(60)
    read = {name: torch.zeros_like(tensor) for name, tensor in made.items()}
    checkpoint.load(tmp_path, read)
    assert all(torch.equal(read[name], tensor) for name, tensor in made.items())
    with safe_open(tmp_path / SHARD, "pt") as file:
        assert all(
            torch.equal(file.get_tensor(name), tensor)
            for name, tensor in made.items()
            if tensor.numel()
        )


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path, engine: FSDPEngine) -> None:
    tensor = torch.ones(1 << 20)
    pending = checkpoint.save(tmp_path, {"x": tensor}, engine.mesh, {})
    tensor.zero_()
    pending.wait(60)
    read = torch.zeros_like(tensor)
    checkpoint.load(tmp_path, {"x": read})
    assert torch.equal(read, torch.ones_like(tensor))


def test_saves_that_overlap_do_not_mix(tmp_path: Path, engine: FSDPEngine) -> None:
    tensor, host, pending = torch.zeros(1 << 20), {}, []
    for step in range(6):
        (tmp_path / str(step)).mkdir()
        tensor.fill_(step)
        pending.append(checkpoint.save(tmp_path / str(step), {"x": tensor}, engine.mesh, host))
        if step == 3:
            pending[0].wait(60)  # later ones may reuse its memory
    for step, save in enumerate(pending):
        save.wait(60)
        read = torch.zeros_like(tensor)
        checkpoint.load(tmp_path / str(step), {"x": read})
        assert bool((read == step).all())
    assert list(host) == ["x"]


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(data[:-1])
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "header":
        path.write_bytes(data[:8] + b"[" + data[9:])
    else:
        path.write_bytes(b"\xff" * 8 + data[8:])


@pytest.mark.parametrize("how", ["missing", "truncated", "emptied", "header", "length"])
@pytest.mark.parametrize("name", [SHARD, "index.json"])
def test_a_damaged_file_is_named(engine: FSDPEngine, saved: Path, how: str, name: str) -> None:
    damage(saved / name, how)
    with pytest.raises(CouplerError, match=str(saved)) as caught:
        engine.load(saved, EVERYTHING)
    assert name in str(caught.value)


def test_another_dtype_does_not_fit(tmp_path: Path, engine: FSDPEngine) -> None:
    checkpoint.save(tmp_path, {"x": torch.ones(2)}, engine.mesh, {}).wait(60)
    with pytest.raises(CouplerError, match="does not fit"):
        checkpoint.load(tmp_path, {"x": torch.ones(2, dtype=torch.bfloat16)})


def test_a_failed_write_is_raised_by_wait(engine: FSDPEngine, tmp_path: Path) -> None:
    pending = engine.save(tmp_path / "absent", frozenset({Part.PARAMS}))
    with pytest.raises(FileNotFoundError, match="absent"):
        pending.wait(60)


def test_a_wait_has_an_end(engine: FSDPEngine, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SHARD)  # a write that blocks until somebody reads
    pending = engine.save(tmp_path, frozenset({Part.PARAMS}))
    with pytest.raises(WaitTimeout, match=SHARD):
        pending.wait(0.05)
    (tmp_path / SHARD).read_bytes()
    # a pipe cannot be flushed to a disk
    with pytest.raises(OSError, match="Invalid argument"):
        pending.wait(60)
