"""LoRA: what is trained, what a rollout gets, and the policy without it as the
reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    WANT,
    arrays,
    info,
    loss,
    make_batch,
    make_engine,
    reference,
    worst,
    write_model,
)
from transformers import GPT2Config

from coupler.engine_kit.lora_names import names_of
from coupler.engine_kit.peft_folder import write_adapter
from coupler.errors import ConfigError, CouplerError
from coupler.interfaces import EVERYTHING, Output
from coupler_engine_fsdp.config import FSDPConfig
from coupler_engine_fsdp.engine import FSDPEngine
from coupler_engine_fsdp.plugin import coupler_backends

Folder = Callable[[str], Path]
RANK, ALPHA = 4, 8.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BASE = (Output("base_logprobs"),)


@pytest.fixture
def engine(folder_of: Folder) -> FSDPEngine:
    return make_engine(folder_of("qwen2"), lora_rank=RANK, lora_alpha=ALPHA, lr=1e-2)


def train(engine: FSDPEngine, steps: int = 3) -> None:
    for index in range(steps):
        batch = make_batch(seed=index)
        engine.forward_backward(batch, WANT, loss, info(batch, index))
        assert engine.step().applied


def test_it_starts_as_the_model(engine: FSDPEngine, folder_of: Folder) -> None:
    outputs, _ = reference(folder_of("qwen2"))
    np.testing.assert_allclose(
        engine.forward(make_batch(), WANT)["logprobs"], outputs["logprobs"], atol=5e-5
    )
    plain = arrays(make_engine(folder_of("qwen2")).weights())
    for name, tensor in arrays(engine.weights()).items():
        np.testing.assert_array_equal(tensor, plain[name], err_msg=name)


def test_gradients_follow_from_those_of_the_weights(engine: FSDPEngine, folder_of: Folder) -> None:
    """With W + s B A for W: dB = s dW A^T and dA = s B^T dW, where B is 0 at first."""
    batch = make_batch()
    engine.forward_backward(batch, WANT, loss, info(batch))
    got, dense = arrays(engine.gradients()), reference(folder_of("qwen2"))[1]
    want = {}
    for name, (_, a, _) in engine.adapter.updates.items():
        for_a, for_b = names_of(name)
        want[for_a] = np.zeros(a.shape, np.float32)
        want[for_b] = ALPHA / RANK * dense[name] @ a.detach().numpy().T
    assert len(want) == 2 * 7 * 2  # seven linear maps in each of two layers
    assert worst(got, want) < 5e-5


def test_a_rollout_gets_the_sum(engine: FSDPEngine, folder_of: Folder, tmp_path: Path) -> None:
    """A model of the weights that were sent has the engine's log-probs; only linear
    maps of layers have moved.
    """
    train(engine)
    plain = make_engine(folder_of("qwen2"))
    before = arrays(plain.weights())
    with torch.no_grad():
        for name, tensor in engine.weights():
            plain.named[name].copy_(tensor)
    batch = make_batch(seed=9)
    got, want = (e.forward(batch, WANT)["logprobs"] for e in (engine, plain))
    np.testing.assert_allclose(got, want, atol=2e-5)
    moved = {
        name
        for name, tensor in arrays(engine.weights()).items()
        if not np.array_equal(tensor, before[name])
    }
    assert moved == {name for name in before if "_proj.weight" in name}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_apart_they_add_up_to_the_sum(folder_of: Folder, dtype: str) -> None:
    """Every A and B that is trained travels, B with its scale; the weights beneath are
    the folder's.
    """
    engine = make_engine(
        folder_of("qwen2"),
        lora_rank=RANK,
        lora_alpha=ALPHA,
        lr=1e-2,
        dtype=dtype,
        sync_dtype="fp32",
    )
    train(engine)
    base, adapter, merged = (
        arrays(w()) for w in (engine.base_weights, engine.adapter_weights, engine.weights)
    )
    # A weight that does not train is held in the dtype that it computes in.
    held = dict(make_engine(folder_of("qwen2")).weights())
    plain = arrays((n, t.to(DTYPES[dtype])) for n, t in held.items())
    assert {name: tensor.tolist() for name, tensor in base.items()} == {
        n: t.tolist() for n, t in plain.items()
    }
    assert len(adapter) == len(engine.adapter.parameters()) == 2 * 7 * 2
    for name, tensor in merged.items():
        a, b = names_of(name)
        update = adapter[b] @ adapter[a] if a in adapter else 0.0
        np.testing.assert_allclose(base[name] + update, tensor, atol=1e-6, err_msg=name)


def test_adapters_are_declared_where_there_is_one() -> None:
    (engine,) = (backend for backend in coupler_backends() if backend.kind == "engine")
    assert "weights:lora" in engine.capabilities_of(FSDPConfig(lora_rank=RANK))
    assert "weights:lora" not in engine.capabilities_of(FSDPConfig())
    assert FSDPConfig(lora_rank=RANK).adapter_rank == ("lora_rank", RANK)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_without_the_adapter_it_is_the_reference(folder_of: Folder, checkpointing: bool) -> None:
    settings = {"lora_rank": RANK, "lr": 1e-2, "gradient_checkpointing": checkpointing}
    engine = make_engine(folder_of("qwen3"), **settings)
    before = engine.forward(make_batch(), WANT)["logprobs"]
    train(engine)
    np.testing.assert_array_equal(engine.forward(make_batch(), BASE)["base_logprobs"], before)
    assert np.abs(engine.forward(make_batch(), WANT)["logprobs"] - before).max() > 1e-2


def test_a_checkpoint_holds_the_adapter_alone(
    engine: FSDPEngine, folder_of: Folder, tmp_path: Path
) -> None:
    train(engine)
    engine.save(tmp_path, EVERYTHING).wait(60)
    size, weights = (
        sum(p.stat().st_size for p in tmp_path.iterdir()),
        sum(w.nbytes for w in engine.named.values()),
    )
    # with the optimizer, which is twice as large as what is trained
    assert size < 0.5 * weights
    resumed = make_engine(folder_of("qwen2"), lora_rank=RANK, lora_alpha=ALPHA, lr=1e-2)
    resumed.load(tmp_path, EVERYTHING)
    batch = make_batch(seed=9)
    results = []
    for one in (engine, resumed):
        one.forward_backward(batch, WANT, loss, info(batch, 3))
        results.append((one.step(), arrays(one.weights())))
    assert results[0][0] == results[1][0]
    assert worst(results[1][1], results[0][1]) == 0


def peft(folder: Path, **changes: object) -> Path:
    """Write an adapter of rank 4 for two maps of ``qwen2``, with a changed file."""
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)]
    pairs = {}
    for name in names:
        pairs |= dict(zip(names_of(name), (torch.ones(4, 48), torch.ones(48, 4)), strict=True))
    write_adapter(pairs.items(), folder, "", write=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "settings", "what"),
    [
        ({"r": 8}, {}, "engine.lora_rank=4 and the adapter .* has rank 8"),
        ({"use_dora": True}, {}, "is no plain LoRA: use_dora=True"),
        ({"peft_type": "IA3"}, {}, "is no plain LoRA: peft_type=IA3"),
        ({"lora_alpha": None}, {}, "holds no adapter of PEFT"),
        ({}, {"target_modules": ["k_proj"]}, r"try:  engine.target_modules=\[q_proj\]"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(
    changes: dict[str, object],
    settings: dict[str, object],
    what: str,
    folder_of: Folder,
    tmp_path: Path,
) -> None:
    path = peft(tmp_path / "peft", **changes)
    settings = {"target_modules": ["q_proj"], **settings}
    with pytest.raises(CouplerError, match=what):
        make_engine(folder_of("qwen2"), lora_rank=RANK, lora_adapter_path=str(path), **settings)


def test_a_model_without_a_linear_map_is_refused(tmp_path: Path) -> None:
    """Layers of GPT-2 have matrices of another kind."""
    sizes = {"vocab_size": 99, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    folder = write_model(tmp_path, GPT2Config(**sizes))
    with pytest.raises(ConfigError, match=r"(?s)target_modules names all-linear.*has:  none"):
        make_engine(folder, lora_rank=RANK)


def test_the_scale_of_a_folder_is_its_own(folder_of: Folder, tmp_path: Path) -> None:
    """Rank-stabilised adapters too: lora_alpha / sqrt(r)."""
    plain = arrays(make_engine(folder_of("qwen2")).weights())
    for alpha, stable, scale in ((8, False, 2.0), (8, True, 4.0)):
        path = peft(tmp_path / str(stable), lora_alpha=alpha, use_rslora=stable)
        engine = make_engine(
            folder_of("qwen2"),
            lora_rank=RANK,
            target_modules=["q_proj"],
            lora_adapter_path=str(path),
        )
        for name, tensor in engine.weights():
            update = scale * 4 if name.endswith("q_proj.weight") else 0.0
            np.testing.assert_allclose(tensor, plain[name] + update, atol=1e-5, err_msg=name)
