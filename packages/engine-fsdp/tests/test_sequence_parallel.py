"""Sequences that several ranks split (Ulysses), over gloo: one gradient, one
checkpoint, and what is refused.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import closeness, make_engine

from coupler.errors import ConfigError, CouplerError, TooFewDevices
from coupler.interfaces import Part, Rank
from coupler.testing import losses
from coupler.testing.cases import LENGTHS, RAGGED, make_batch, weighted
from coupler.testing.ranks import World
from coupler.testing.reference import TransformersReference
from coupler_engine_fsdp import sequence
from coupler_engine_fsdp.config import FSDPConfig
from coupler_engine_fsdp.layout import heads_of, problems, read_heads
from coupler_engine_fsdp.sequence import Peers

Folder = Callable[[str], Path]
SURROGATE = "coupler.testing.losses:surrogate"
LIMIT = 5e-5 if torch.cuda.is_available() else 1e-5
# Models, ranks and settings. Models have 4 heads and 2 of keys where they do not say
# otherwise.
CASES = {
    "two": ("qwen2", 2, {"sequence_parallel": 2}),
    "four": ("llama", 4, {"sequence_parallel": 4, "gradient_checkpointing": True}),
    "two-by-two": ("qwen3", 4, {"sequence_parallel": 2}),
    "window": ("mistral", 4, {"sequence_parallel": 4}),
    "three": ("six-heads", 3, {"sequence_parallel": 3}),
    "four-of-eight": ("eight-heads", 4, {"sequence_parallel": 4}),
    "experts": ("experts", 2, {"sequence_parallel": 2}),
    "hybrid": ("qwen2", 4, {"sequence_parallel": 4, "fsdp_size": 2}),
    "apart": ("qwen3", 4, {"sequence_parallel": 2, "fsdp_size": 1}),
}


def recipe(folder: Path, **settings: object) -> dict:
    return {
        "target": "coupler_engine_fsdp.engine:FSDPEngine",
        "config": "coupler_engine_fsdp.config:FSDPConfig",
        "settings": {"gradient_checkpointing": False, "dtype": "fp32", "lr": 1e-30, **settings},
        "model": str(folder),
        "head": "lm",
    }


@contextmanager
def running(folder: Path, place: Path, ranks: int, **settings: object) -> Iterator[World]:
    place.mkdir(exist_ok=True)
    try:
        world = World(recipe(folder, **settings), ranks, place)
    except TooFewDevices as error:
        pytest.skip(str(error).splitlines()[0])
    yield world
    world.close()


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_split_sequences_have_one_gradient(
    folder_of: Folder, tmp_path: Path, case: str
) -> None:
    model, ranks, settings = CASES[case]
    reference = TransformersReference(folder_of(model))
    with running(folder_of(model), tmp_path, ranks, max_tokens_per_gpu=7, **settings) as world:
        for lengths in (LENGTHS, RAGGED):
            batch = weighted(make_batch(reference, lengths))
            shards = [batch.take(rows) for rows in batch.partition(world.layout.num_shards)]
            want = reference.gradient(batch, losses.surrogate)
            got, metrics, steps = world.gradient(shards, SURROGATE)
            for name, true in want.grads.items():
                off = np.abs(got[name] - true).max() / np.abs(true).max()
                assert off < LIMIT, (name, off)
            # Tokens that fill a part up have id 0, which the batch has not.
            tied = "lm_head.weight" not in got
            assert tied or not got["model.embed_tokens.weight"][0].any()
            for name, metric in want.metrics.items():
                assert metrics[name].value == pytest.approx(metric.value, rel=1e-4), name
            assert all(step == steps[0] for step in steps)
            assert steps[0][1] == pytest.approx(want.norm, rel=1e-4)


def test_sums_of_squares_are_whole_on_ranks_that_split_sequences(
    folder_of: Folder, tmp_path: Path
) -> None:
    """Packed rows, several micro-batches, their values and their gradient."""
    reference = TransformersReference(folder_of("qwen2"))
    batch = weighted(make_batch(reference))
    want = reference.outputs(batch)["sum_pi_squared"]
    names = ("sum_pi_squared", "logprobs", "entropy")

    with running(
        folder_of("qwen2"), tmp_path, 2, sequence_parallel=2, max_tokens_per_gpu=7
    ) as world:
        found = world.forward([batch], ("sum_pi_squared",))[0]["sum_pi_squared"]
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=0)
        assert np.ptp(want[batch["loss_mask"]]) > 0.01 and not found[~batch["loss_mask"]].any()
        got, _, _ = world.gradient([batch], "coupler.testing.losses:squares", names)
    for name, true in reference.gradient(batch, losses.squares).grads.items():
        assert np.abs(got[name] - true).max() < LIMIT * np.abs(true).max(), name


def test_ids_and_their_logprobs_are_whole_on_ranks_that_split_sequences(
    folder_of: Folder, tmp_path: Path
) -> None:
    """Packed rows, several micro-batches, their values and their gradient."""
    reference = TransformersReference(folder_of("qwen2"))
    batch = weighted(make_batch(reference))
    want = ("logprobs", ("top_ids", 5), "top_logprobs")

    with running(
        folder_of("qwen2"), tmp_path, 2, sequence_parallel=2, max_tokens_per_gpu=7
    ) as world:
        done = world.forward([batch], want)[0]
        named = batch.with_tokens(top_ids=done["top_ids"])
        for name, true in reference.outputs(named).items():
            if name in done.tokens:
                np.testing.assert_allclose(done[name], true, rtol=1e-4, atol=1e-5)
        falls = np.diff(done["top_logprobs"], axis=1)[batch["loss_mask"]]
        assert (falls <= 0).all() and falls.any()
        loss = "coupler.testing.losses:among"
        got, _, _ = world.gradient([named], loss, ("top_logprobs", "logprobs"))
    for name, true in reference.gradient(named, losses.among).grads.items():
        assert np.abs(got[name] - true).max() < LIMIT * np.abs(true).max(), name


@pytest.mark.parametrize("size", [2, 4])
def test_an_adapter_trains_as_on_one_rank(folder_of: Folder, tmp_path: Path, size: int) -> None:
    """Both of its factors, and the log-probs without it."""
    folder, settings = folder_of("llama"), {"lora_rank": 6, "lr": 1e-2}
    batches = [weighted(make_batch(TransformersReference(folder), seed=i)) for i in range(3)]
    want = ("logprobs", "base_logprobs")
    found = []
    for ranks in (1, size):
        more = {**settings, "sequence_parallel": ranks}
        with running(folder, tmp_path / str(ranks), ranks, **more) as world:
            steps = [world.gradient([b], SURROGATE, index=i) for i, b in enumerate(batches)]
            done = world.forward([batches[0]], want)[0]
            found.append((steps, done, world.weights()))

    (steps, done, weights), (split_steps, split_done, split_weights) = found
    for (grads, _, results), (others, _, split_results) in zip(steps, split_steps, strict=True):
        assert results[0][1] == pytest.approx(split_results[0][1], rel=1e-3)
        for name, grad in grads.items():
            off = np.abs(others[name] - grad).max()
            assert off <= 1e-3 * np.abs(grad).max(), (name, off)
    for name in want:
        np.testing.assert_allclose(split_done[name], done[name], atol=1e-3, err_msg=name)
    assert np.abs(done["logprobs"] - done["base_logprobs"]).max() > 0.01, "nothing was trained"
    for name, weight in weights.items():
        np.testing.assert_allclose(split_weights[name], weight, atol=1e-3, err_msg=name)


def test_bf16_is_as_near_as_on_one_rank(folder_of: Folder, tmp_path: Path) -> None:
    reference = TransformersReference(folder_of("qwen3"))
    batch = weighted(make_batch(reference))
    want = reference.gradient(batch, losses.surrogate)
    found = []
    for ranks in (1, 2):
        more = {"dtype": "bf16", "sequence_parallel": ranks}
        with running(folder_of("qwen3"), tmp_path / str(ranks), ranks, **more) as world:
            found.append(closeness(world.gradient([batch], SURROGATE)[0], want.grads))
    assert found[1] > found[0] - 0.01 > 0.9, found


def test_a_checkpoint_goes_to_whole_sequences_and_back_to_the_bit(
    folder_of: Folder, tmp_path: Path
) -> None:
    """Two ranks that split sequences, one rank, and four that split them."""
    folder, everything = folder_of("qwen2"), (Part.PARAMS, Part.OPTIMIZER)
    batches = [weighted(make_batch(TransformersReference(folder), seed=i)) for i in range(2)]
    kept: dict[str, np.ndarray] = {}
    norms = []
    for ranks in (2, 1, 4):
        more = {"sequence_parallel": ranks, "lr": 1e-2}
        with running(folder, tmp_path / str(ranks), ranks, **more) as world:
            if kept:
                world.load(tmp_path / "saved", *everything)
            else:
                world.gradient([batches[0]], SURROGATE)
                kept = world.weights()
            for name, weight in world.weights().items():
                np.testing.assert_array_equal(weight, kept[name], err_msg=name)
            shutil.rmtree(tmp_path / "saved", ignore_errors=True)
            (tmp_path / "saved").mkdir()
            world.save(tmp_path / "saved", *everything)
            norms.append(world.gradient([batches[1]], SURROGATE, index=1)[2][0])
    assert [norm for _, norm, _ in norms] == pytest.approx([norms[0][1]] * 3, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "ranks", "sentence"),
    [
        (
            {"sequence_parallel": 3},
            3,
            "engine.sequence_parallel=3 does not divide the 4 attention heads of the model: "
            "set it to 1.",
        ),
        (
            {"sequence_parallel": 8},
            8,
            "engine.sequence_parallel=8 does not divide the 4 attention heads of the model: "
            "set it to 1, 2 or 4.",
        ),
        (
            {"sequence_parallel": 4},
            2,
            "engine.sequence_parallel=4 does not divide engine.ranks=2: set it to 1 or 2.",
        ),
        (
            {"fsdp_size": 4},
            2,
            "engine.fsdp_size=4 does not divide engine.ranks=2: set it to a divisor, or to 0: "
            "all ranks share one copy.",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_the_start(
    folder_of: Folder, settings: dict, ranks: int, sentence: str
) -> None:
    """By the plan from ``config.json``, and by setup before it joins a group."""
    folder, config = folder_of("qwen2"), FSDPConfig(**settings)
    found = [f"{what}: {fix}." for what, fix in problems(config, ranks, read_heads(folder))]
    assert found == [sentence]
    with pytest.raises(ConfigError, match=re.escape(sentence.partition(":")[0])):
        make_engine(folder, Rank(world=ranks), **settings)


def test_one_rank_takes_up_what_several_shared() -> None:
    """A replay and an export read a split run."""
    split = FSDPConfig(fsdp_size=2, sequence_parallel=2)
    alone = replace(split, **split.one_rank)
    assert not [*problems(alone, alone.ranks, heads=4)]
    assert (split.split, alone.split, split.ranks_per_shard) == ("sequence 2", "", 2)


def test_heads_are_those_of_the_text_part(tmp_path: Path) -> None:
    assert read_heads(tmp_path) == 0
    (tmp_path / "config.json").write_text("{")
    assert read_heads(tmp_path) == 0
    assert heads_of({"text_config": {"num_attention_heads": 6}, "num_attention_heads": 9}) == 6


def test_a_layer_with_heads_of_its_own_is_refused() -> None:
    """Where a model's layers differ, its configuration may name another number."""
    query = torch.zeros(1, 6, 5, 8)
    with pytest.raises(CouplerError, match=r"sequence_parallel=4 does not divide the 6 att"):
        Peers(4, 0, "none").to_heads(query, query, query)


def test_the_exchange_is_an_operator_that_compiles(folder_of: Folder) -> None:
    """Its shapes and its gradient are those that ``torch.compile`` is told."""
    make_engine(folder_of("qwen2"))  # joins a group of one rank
    assert dist.group.WORLD is not None
    sequence._groups["alone"] = dist.group.WORLD
    parts = torch.randn(1, 3, 4, requires_grad=True)
    torch.library.opcheck(sequence.swap, (parts, "alone"))
