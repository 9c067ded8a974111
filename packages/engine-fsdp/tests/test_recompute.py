"""Layers that compute their activations again: how many the plan chooses, what they
take, and that no value depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import WANT, arrays, info, loss, make_batch, make_engine
from transformers import AutoConfig, AutoModelForCausalLM

from coupler.batch import Batch
from coupler.config.compose import compose
from coupler.config.schema import Job
from coupler.engine_kit.memory_plan import GIB, Asked, Needs, Phase, Recomputed, total
from coupler.errors import ConfigError, CouplerError
from coupler.interfaces import Head, Model, Output, Rank
from coupler.plugins.manager import Plugins
from coupler.run.memory_plan import ROOM
from coupler.testing.memory import (
    LARGE,
    LENGTH,
    SMALL,
    TOKENS,
    measured_batch,
    peak_bytes,
    surprise,
)
from coupler.testing.subject import configured
from coupler_engine_fsdp import model as models
from coupler_engine_fsdp.config import FSDPConfig, Recompute
from coupler_engine_fsdp.engine import FSDPEngine

Folder = Callable[[str], Path]
LOGPROBS = (Output("logprobs"),)
MEASURED = 0.15
LAYERS = SMALL["num_hidden_layers"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("measured"))


def write_model(path: Path, **changes: Any) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**(SMALL | changes))
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def first(layers: int, every: int = LAYERS) -> dict[str, Any]:
    """Return the options with which so many layers recompute."""
    if not layers:
        return {"gradient_checkpointing": "false"}
    return {"gradient_checkpointing": "true", "recompute_num_layers": layers % every}


def asked(path: Path, **facts: Any) -> Asked:
    known = {"trains": True, "gpu": False, "tokens": TOKENS, "longest": LENGTH, **facts}
    return Asked(path="engine", model=Model(str(path)), shape={}, **known)


def training(needs: Needs) -> int:
    return total(needs.peaks[Phase.TRAINING])


def gradients(folder: Path, layers: int, **settings: Any) -> dict[str, np.ndarray]:
    settings = {"max_tokens_per_gpu": 1024, **first(layers), **settings}
    engine = make_engine(folder, Rank(deterministic=True), **settings)
    engine.forward_backward(measured_batch(), LOGPROBS, surprise, info(measured_batch()))
    again = [models.recomputes(layer) for layer in models.layers_of(engine.policy)]
    assert again == [True] * layers + [False] * (LAYERS - layers)
    found = arrays(engine.gradients())
    engine.close()
    return found


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("settings", [{}, {"dtype": "bf16"}, {"lora_rank": 4}], ids=str)
def test_no_bit_of_a_gradient_depends_on_it(folder: Path, settings: dict[str, Any]) -> None:
    whole = gradients(folder, 0, **settings)
    for layers in range(1, LAYERS + 1):
        some = gradients(folder, layers, **settings)
        assert some.keys() == whole.keys()
        assert all(np.array_equal(some[name], whole[name]) for name in whole), layers


def test_layers_of_a_kind_are_compiled_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a deep model meets PyTorch's limit, and its last layers run as they are.

    Graphs are counted before a backend compiles them.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    found = []
    for layers in (2, 5):
        folder = write_model(tmp_path / str(layers), num_hidden_layers=layers)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

        engine = make_engine(folder, compile=True, gradient_checkpointing="false")
        engine.forward_backward(measured_batch(), LOGPROBS, surprise, info(measured_batch()))
        found.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        engine.close()
    assert found[0] == found[1] > 0


@pytest.mark.slow
def test_some_layers_of_a_compiled_model(
    folder_of: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the code that a backend writes: its compiler takes most of a minute."""
    backend = "aot_eager_decomp_partition"
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    batch = make_batch()
    found = []
    for settings in ({}, first(1, every=2)):
        engine = make_engine(folder_of("qwen3"), compile=True, **settings)
        engine.forward_backward(batch, WANT, loss, info(batch))
        found.append(arrays(engine.gradients()))
    assert all(np.allclose(found[1][name], found[0][name], atol=1e-6) for name in found[0])


def test_auto_alone_recomputes_all_layers(folder: Path) -> None:
    """So does an engine that no plan has given a number, as on the CPU."""
    config = FSDPConfig(gradient_checkpointing=Recompute.AUTO)
    assert config.recomputed is None
    assert training(config.memory_needs(asked(folder))) == training(
        FSDPConfig().memory_needs(asked(folder))
    )


@pytest.mark.parametrize("settings", [{}, {"dtype": "bf16"}, {"lora_rank": 8}], ids=str)
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_plan_of_some_layers(folder: Path, layers: int, settings: dict[str, Any]) -> None:
    config, model = FSDPConfig(**first(layers), **settings), Model(str(folder))
    engine = FSDPEngine(config, model)
    engine.setup(Rank())

    def train() -> None:
        engine.forward_backward(measured_batch(), LOGPROBS, surprise, info(measured_batch()))
        assert engine.step().applied

    train()
    plan = training(config.memory_needs(asked(folder)))
    assert plan == pytest.approx(peak_bytes(train), rel=MEASURED)
    engine.close()


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        pytest.param(shape, settings, marks=pytest.mark.slow if large and settings else ())
        for shape, large in (("1.5b", True), ("7b", True), ("moe", False))
        for settings in ({}, {"ranks": 2}, {"compile": True}, {"lora_rank": 16})
    ],
    ids=str,
)
def test_more_layers_take_no_more(tmp_path: Path, shape: str, settings: dict[str, Any]) -> None:
    AutoConfig.for_model(**LARGE[shape]).save_pretrained(tmp_path)
    every = LARGE[shape]["num_hidden_layers"]
    facts = asked(tmp_path, gpu=True, tokens=16_384, longest=2048)
    numbers = [0, 1, every // 2, every - 1, every]
    plans = [
        training(FSDPConfig(**first(n, every), **settings).memory_needs(facts)) for n in numbers
    ]
    # A layer that is computed again is planned as if it were not compiled.
    start = 1 if settings.get("compile") else 0
    assert plans[start:] == sorted(plans[start:], reverse=True)
    assert plans[0] > plans[-1] or start


def chosen(path: Path, room: float, **settings: Any) -> Recomputed:
    config = FSDPConfig(gradient_checkpointing="auto", **settings)
    facts = asked(path, gpu=True, tokens=16_384, longest=2048)
    return config.choose_recompute(facts, lambda needs: training(needs) <= room)


def test_auto_takes_the_fewest_layers_that_fit(tmp_path: Path) -> None:
    AutoConfig.for_model(**LARGE["1.5b"]).save_pretrained(tmp_path)
    facts = asked(tmp_path, gpu=True, tokens=16_384, longest=2048)
    none, all_ = chosen(tmp_path, math.inf), chosen(tmp_path, 0)
    assert (none.layers, none.every, all_.layers) == (0, 28, 28)
    assert none.config.gradient_checkpointing == Recompute.FALSE
    assert all_.config == FSDPConfig()

    room = 25 * GIB
    some = chosen(tmp_path, room)
    assert 0 < some.layers < 28
    assert some.config.recomputed == some.layers
    assert training(some.needs) <= room
    fewer = FSDPConfig(**first(some.layers - 1)).memory_needs(facts)
    assert training(fewer) > room


def test_auto_of_a_critic(folder: Path) -> None:
    facts = Asked(path="critic.engine", model=Model(str(folder), head=Head.VALUE), shape={})
    config = FSDPConfig(gradient_checkpointing="auto")
    assert config.choose_recompute(facts, None).layers == LAYERS
    assert config.choose_recompute(facts, lambda _: True).layers == 0


def test_layers_that_do_not_choose_recompute_all_or_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models of other authors may have one flag for all of their layers."""
    monkeypatch.setattr(models, "can_choose", lambda _: False)
    monkeypatch.setattr("coupler_engine_fsdp.memory.recompute.can_choose", lambda _: False)
    half = training(FSDPConfig().memory_needs(asked(folder)))
    config = FSDPConfig(gradient_checkpointing="auto")
    fits = config.choose_recompute(asked(folder), lambda needs: training(needs) <= half)
    assert fits.layers == LAYERS
    assert config.choose_recompute(asked(folder), lambda _: True).layers == 0
    with pytest.raises(CouplerError, match=r"=2 needs layers that recompute one by one, .*qwen2"):
        make_engine(folder, **first(2))


@pytest.mark.parametrize("value", [True, False])
def test_values_of_python_are_those_of_the_option(value: bool) -> None:
    found = configured(FSDPConfig, {"gradient_checkpointing": value})
    assert found == FSDPConfig(gradient_checkpointing=str(value).lower())
    assert found.recomputed == (None if value else 0)


def test_mistakes(folder: Path) -> None:
    wrong = ["engine=fsdp", "rollout=toy", "algorithm=toy", "engine.gradient_checkpointing=12"]
    with pytest.raises(ValueError, match="'some' is not a valid Recompute"):
        FSDPConfig(gradient_checkpointing="some")
    with pytest.raises(ConfigError, match=r"checkpointing takes true, false or auto \(.*, got 12"):
        compose(Plugins.load(), wrong, job=Job.TRAIN)
    with pytest.raises(ValueError, match="recompute_num_layers must not be negative"):
        FSDPConfig(recompute_num_layers=-1)
    with pytest.raises(ValueError, match=r"needs engine\.gradient_checkpointing=true"):
        FSDPConfig(gradient_checkpointing="auto", recompute_num_layers=2)
    with pytest.raises(CouplerError, match=r"must be at most 4, the layers of model\.path, got 5"):
        make_engine(folder, gradient_checkpointing=True, recompute_num_layers=5)


def long_batch(sequences: int) -> Batch:
    """Return so many sequences of 2,048 tokens."""
    lengths = np.full(sequences, 2048)
    mask = np.ones(lengths.sum(), bool)
    mask[np.cumsum(lengths) - lengths] = False
    tokens = np.random.default_rng(0).integers(0, 2048, len(mask)).astype(np.int32)
    weight = (mask / mask.sum()).astype(np.float32)
    return Batch(lengths, {"tokens": tokens, "loss_mask": mask, "loss_weight": weight})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_auto_trains_the_largest_batch_that_fits(tmp_path: Path) -> None:
    """PyTorch may take the memory of a GPU on which half of the layers' activations
    fit. With all of them it runs out.
    """
    shape = AutoConfig.for_model(**LARGE["1.5b"])
    with torch.device("cuda"):
        AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(tmp_path)
    batch = long_batch(8)
    facts = asked(tmp_path, gpu=True, tokens=batch.num_tokens, longest=2048)
    both = [FSDPConfig(**first(n, 28)).memory_needs(facts) for n in (0, 28)]
    held = sum(total(terms) for terms in both[0].held.values())
    room = held + sum(map(training, both)) // 2
    config = FSDPConfig(gradient_checkpointing="auto")
    found = config.choose_recompute(facts, lambda needs: held + training(needs) <= room)
    assert 0 < found.layers < 28

    def train(config: FSDPConfig) -> None:
        engine = FSDPEngine(config, Model(str(tmp_path)))
        engine.setup(Rank())
        with closing(engine):
            for _ in range(3):
                engine.forward_backward(batch, LOGPROBS, surprise, info(batch))
                assert engine.step().applied

    torch.cuda.empty_cache()
    memory = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(room / ROOM / memory)
    try:
        train(found.config)
        torch.cuda.empty_cache()
        with pytest.raises(torch.OutOfMemoryError):
            train(FSDPConfig(**first(0)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
