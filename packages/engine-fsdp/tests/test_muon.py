"""Muon: the update in closed form, what it trains, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import WANT, arrays, info, loss, make_batch, make_engine, worst

from coupler.interfaces import EVERYTHING
from coupler_engine_fsdp.config import FSDPConfig
from coupler_engine_fsdp.engine import FSDPEngine
from coupler_engine_fsdp.muon import orthogonalise

Folder = Callable[[str], Path]
MUON = {"optimizer": "muon", "lr": 1e-2, "weight_decay": 0.1}


def train(engine: FSDPEngine, index: int) -> None:
    batch = make_batch(seed=index)
    engine.forward_backward(batch, WANT, loss, info(batch, index))
    assert engine.step().applied


@pytest.mark.parametrize("shape", [(6, 6), (4, 12), (12, 4)])
def test_an_orthogonal_matrix_comes_out(shape: tuple[int, int]) -> None:
    """Singular values near 1 and the singular vectors of the input."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    found = u.T @ orthogonalise(matrix, torch.float32).double() @ v.T
    assert (s.min() / s.max()) > 0.02, "no direction is too small for five iterations"
    assert float(found.diagonal().min()) > 0.6 and float(found.diagonal().max()) < 1.3
    np.testing.assert_allclose(found - found.diagonal().diag(), 0, atol=1e-5)


def test_the_update_in_closed_form(folder_of: Folder) -> None:
    """Two steps in float64; what is no matrix of a layer moves as under AdamW."""
    engine = make_engine(folder_of("qwen2"), max_grad_norm=0.0, **MUON)
    adamw = make_engine(folder_of("qwen2"), max_grad_norm=0.0, **{**MUON, "optimizer": "adamw"})
    names = [name for name in engine.named if ".layers." in name and "_proj.weight" in name]
    assert engine.matrices == names and len(names) == 14
    momentum = {name: torch.zeros(()) for name in names}

    for index in range(2):
        before = {name: t.detach().double() for name, t in engine.named.items()}
        batch = make_batch(seed=index)
        engine.forward_backward(batch, WANT, loss, info(batch, index))
        grads = {
            name: torch.from_numpy(g).double() for name, g in arrays(engine.gradients()).items()
        }
        engine.step()
        for name in names:
            momentum[name] = 0.95 * momentum[name] + 0.05 * grads[name]
            update = orthogonalise(0.95 * momentum[name] + 0.05 * grads[name], torch.float64)
            scale = 0.2 * max(update.shape) ** 0.5
            want = before[name] * (1 - 1e-2 * 0.1) - 1e-2 * scale * update.double()
            np.testing.assert_allclose(engine.named[name].detach(), want, atol=2e-6, err_msg=name)

    train(adamw, 0)
    first = make_engine(folder_of("qwen2"), max_grad_norm=0.0, **MUON)
    train(first, 0)
    others = [name for name in engine.named if name not in names]
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= {*others}
    for name in others:
        np.testing.assert_array_equal(first.named[name].detach(), adamw.named[name].detach())


def test_a_checkpoint_continues_to_the_bit(folder_of: Folder, tmp_path: Path) -> None:
    engine = make_engine(folder_of("qwen2"), **MUON)
    train(engine, 0)
    engine.save(tmp_path, EVERYTHING).wait(60)
    train(engine, 1)
    resumed = make_engine(folder_of("qwen2"), **MUON)
    resumed.load(tmp_path, EVERYTHING)
    train(resumed, 1)
    assert worst(arrays(resumed.weights()), arrays(engine.weights())) == 0


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"optimizer": "muon", "lora_rank": 4}, "engine.optimizer needs engine.lora_rank=0"),
        ({"muon_momentum": 0.9}, "engine.muon_momentum needs engine.optimizer=muon"),
        ({"optimizer": "muon", "muon_momentum": 1.0}, r"engine.muon_momentum must be in \[0, 1\)"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        FSDPConfig(**settings)
