"""AdamW with moments in 8 bits: near AdamW, small, and continued to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import WANT, arrays, info, loss, make_batch, make_engine, without_torchao, worst
from torch import Tensor, nn

from coupler import RunConfig
from coupler.engine_kit.saved import open_saved
from coupler.errors import CouplerError
from coupler.interfaces import EVERYTHING, Part
from coupler_engine_fsdp import moments
from coupler_engine_fsdp.adamw8bit import block_of, bytes_of
from coupler_engine_fsdp.config import FSDPConfig
from coupler_engine_fsdp.engine import FSDPEngine
from coupler_engine_fsdp.moments import Moments
from coupler_engine_fsdp.plugin import coupler_validate

Folder = Callable[[str], Path]
EIGHT = {"optimizer": "adamw8bit", "lr": 1e-2, "weight_decay": 0.1}
CASES = {
    "fp32": {},
    "masters": {"dtype": "bf16"},
    "micro-batches": {"dtype": "bf16", "max_tokens_per_gpu": 64},
    "lora": {"lora_rank": 4},
    "host": {"dtype": "bf16", "offload_optimizer": True},
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "PIECE", 10_000)


def train(engine: FSDPEngine, index: int) -> None:
    batch = make_batch(seed=index)
    engine.forward_backward(batch, WANT, loss, info(batch, index))
    assert engine.step().applied


def same(first: FSDPEngine, second: FSDPEngine) -> None:
    assert worst(arrays(first.weights()), arrays(second.weights())) == 0


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((151_936, 896), 128),
        ((1024, 576), 64),
        ((2048, 2048), 256),
        ((8, 1536, 48), 256),
        ((4096, 8), 0),
        ((63, 64), 0),
        ((8192,), 0),
    ],
)
def test_rows_are_whole_blocks(shape: tuple[int, ...], block: int) -> None:
    assert block_of(shape) == block
    assert bytes_of(1 << 20, 0) == 8 << 20
    assert bytes_of(1 << 20, 256) == 2 * ((1 << 20) + 4 * (1 << 20) // 256)


def regress(eight: bool, steps: int) -> tuple[list[float], Tensor]:
    """Fit a teacher of two layers, and return the losses and the last weights."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    student = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    shards = dict(student.named_parameters())
    config = FSDPConfig(optimizer="adamw8bit" if eight else "adamw", lr=3e-3, weight_decay=0.01)
    blocks = {name: block_of(p.shape) for name, p in shards.items() if p.ndim > 1}
    held = Moments(config, shards, blocks if eight else {})
    losses = []

    for _ in range(steps):
        inputs = torch.randn(256, 64)
        error = (student(inputs) - teacher(inputs).detach()).square().mean()
        student.zero_grad()
        error.backward()
        losses.append(error.item())
        for piece in held.in_turn():
            held.advance(piece, config.lr)
    return losses, torch.cat([p.detach().flatten() for p in shards.values()])


def test_it_learns_as_adamw_does() -> None:
    """A hundred steps: the loss is within a tenth, and the weights moved alike."""
    (plain, want), (eight, got) = regress(False, 100), regress(True, 100)
    _, start = regress(False, 0)
    assert plain[-1] < 0.25 * plain[0], "the problem is learnt"
    np.testing.assert_allclose(eight, plain, rtol=0.1)
    moved = torch.nn.functional.cosine_similarity(want - start, got - start, dim=0)
    assert float(moved) > 0.98


@pytest.mark.parametrize("scale", [1e-5, 1e-2, 10.0])
@pytest.mark.parametrize("shape", [(256, 256), (2, 128, 64)])
def test_a_weight_without_a_gradient_does_not_run_away(
    shape: tuple[int, ...], scale: float
) -> None:
    """An expert without tokens has none. Its second moments were rounded to 0 before,
    and weights moved by 7,000 times the rate.
    """
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(shape))
    config = FSDPConfig(optimizer="adamw8bit", weight_decay=0.0)
    held = Moments(config, {"w": weight}, {"w": block_of(shape)})
    for index in range(6):
        weight.grad = torch.randn(shape) * scale * (index % 2 == 0)
        before = weight.detach().clone()
        for piece in held.in_turn():
            held.advance(piece, 1.0)
        assert float((weight - before).abs().max()) < 1.2


def test_the_first_update_is_adamws(folder_of: Folder) -> None:
    """Clipping, decay and groups are. Only what a later step reads has 8 bits.

    No number runs away: rows of the embedding have no gradient in the second step.
    """
    eight = make_engine(folder_of("blocks"), max_grad_norm=0.1, **EIGHT)
    plain = make_engine(folder_of("blocks"), max_grad_norm=0.1, **{**EIGHT, "optimizer": "adamw"})
    for engine in (eight, plain):
        train(engine, 0)
    assert worst(arrays(eight.weights()), arrays(plain.weights())) < 1e-5
    for engine in (eight, plain):
        train(engine, 1)
    assert 1e-5 < worst(arrays(eight.weights()), arrays(plain.weights())) < 5e-3


def test_moments_have_8_bits(folder_of: Folder) -> None:
    engine = make_engine(folder_of("blocks"), **EIGHT)
    train(engine, 0)
    held = engine._optimizer.state()
    for name, tensor in engine.named.items():
        kept = {k.removeprefix(f"{name}/"): t for k, t in held.items() if k.startswith(f"{name}/")}
        size = sum(t.nbytes for key, t in kept.items() if key != "step")
        embedding = name == "model.embed_tokens.weight"
        block = 0 if embedding else block_of(tensor.shape)
        assert size == bytes_of(tensor.numel(), block), name
        assert ("exp_avg/codes" in kept) == bool(block)
    storages = sum(t.untyped_storage().nbytes() for t in engine._optimizer.tensors())
    in_codes = sum(t.numel() for n, t in engine.named.items() if n in engine.blocks)
    others = sum(t.numel() for n, t in engine.named.items() if n not in engine.blocks)
    assert in_codes > 60_000
    assert storages <= (2 + 8 / 64) * in_codes + 8 * others + 20_000, "which aligns tensors"


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_continues_to_the_bit(folder_of: Folder, tmp_path: Path, case: str) -> None:
    settings = {**EIGHT, **CASES[case]}
    engine = make_engine(folder_of("blocks"), **settings)
    train(engine, 0)
    engine.save(tmp_path, EVERYTHING).wait(60)
    train(engine, 1)
    resumed = make_engine(folder_of("blocks"), **settings)
    resumed.load(tmp_path, EVERYTHING)
    train(resumed, 1)
    same(engine, resumed)


@pytest.mark.parametrize("case", CASES)
def test_leaving_the_device_changes_no_bit(folder_of: Folder, case: str) -> None:
    still, moved = (make_engine(folder_of("blocks"), **EIGHT, **CASES[case]) for _ in range(2))
    for index in range(3):
        train(still, index)
        moved._park(EVERYTHING)
        assert not any(t.untyped_storage().nbytes() for t in moved.policy.parameters())
        if moved._optimizer:
            pieces = moved._optimizer.moments.pieces
            assert not any(t.untyped_storage().nbytes() for p in pieces for t in p.tensors)
        moved._unpark(EVERYTHING)
        train(moved, index)
    same(still, moved)


def test_moments_in_host_memory_change_no_bit(folder_of: Folder) -> None:
    here, away = (
        make_engine(folder_of("blocks"), offload_optimizer=there, **EIGHT)
        for there in (False, True)
    )
    for index in range(3):
        for engine in (here, away):
            train(engine, index)
    assert len(away._optimizer.moments.pieces) > 2 and not away._optimizer.tensors()
    same(here, away)


@pytest.mark.parametrize("model", ["blocks", "wide-experts"])
@pytest.mark.parametrize(("before", "after"), [("adamw8bit", "adamw"), ("adamw", "adamw8bit")])
def test_a_checkpoint_of_another_precision_is_read(
    folder_of: Folder, tmp_path: Path, before: str, after: str, model: str
) -> None:
    """Moments are as near as 8 bits are, and every engine reads them in fp32."""
    first = make_engine(folder_of(model), **{**EIGHT, "optimizer": before})
    for index in range(2):
        train(first, index)
    first.save(tmp_path, EVERYTHING).wait(60)
    second = make_engine(folder_of(model), **{**EIGHT, "optimizer": after})
    second.load(tmp_path, EVERYTHING)
    same(first, second)

    near, far = (engine._optimizer.moments_of() for engine in (first, second))
    for name, moment in near.items():
        want, got = numbers(moment), numbers(far[name])
        # A code is at most 3.5 % of its block's largest number away.
        np.testing.assert_allclose(got, want, atol=0.036 * np.abs(want).max(), err_msg=name)
    with open_saved(tmp_path) as saved:
        got = saved.tensor("exp_avg_sq", "lm_head.weight").numpy()
        np.testing.assert_allclose(got, numbers(near["lm_head.weight/exp_avg_sq"]), rtol=1e-6)
        assert saved.num_steps == 2

    for engine in (first, second):
        train(engine, 2)
    assert worst(arrays(first.weights()), arrays(second.weights())) < 0.02


def numbers(moment: Any) -> np.ndarray:
    """Return a moment in fp32."""
    plain = type(moment) is Tensor
    return (moment if plain else moment.dequantize()).numpy()


def test_an_adapter_this_small_has_moments_in_fp32(folder_of: Folder) -> None:
    engine = make_engine(folder_of("blocks"), lora_rank=4, **EIGHT)
    train(engine, 0)
    assert not engine._optimizer.moments.maps()


def test_a_missing_library_is_one_sentence(
    folder_of: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig()
    config.engine = FSDPConfig(optimizer="adamw8bit")
    assert not list(coupler_validate(config))

    without_torchao(monkeypatch)
    assert list(coupler_validate(config)) == [
        "engine.optimizer=adamw8bit needs torchao: pip install 'coupler-engine-fsdp[adamw8bit]'."
    ]
    with pytest.raises(CouplerError, match="optimizer=adamw8bit needs torchao"):
        make_engine(folder_of("blocks"), **EIGHT)


def test_parameters_alone_are_read_whatever_the_moments(folder_of: Folder, tmp_path: Path) -> None:
    first = make_engine(folder_of("blocks"), **EIGHT)
    train(first, 0)
    first.save(tmp_path, EVERYTHING).wait(60)
    second = make_engine(folder_of("blocks"))
    second.load(tmp_path, frozenset({Part.PARAMS}))
    same(first, second)
