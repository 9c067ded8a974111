"""Sequences that several ranks split (Ulysses), over gloo: one gradient, one
checkpoint, and what is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from coupler.testing import losses
from coupler.testing.cases import LENGTHS, RAGGED, make_batch, weighted
from coupler.testing.ranks import World
from coupler.testing.reference import TransformersReference

Folder = Callable[[str], Path]
SURROGATE = "coupler.testing.losses:surrogate"
# Models, ranks and settings. Sizes of 2 and 4 are of 4 heads, keys of which are 2.
CASES = {
    "two": ("qwen2", 2, {"sequence_parallel": 2}),
    "four": ("llama", 4, {"sequence_parallel": 4, "gradient_checkpointing": True}),
    "two-by-two": ("qwen3", 4, {"sequence_parallel": 2}),
    "window": ("mistral", 4, {"sequence_parallel": 4}),
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
    world = World(recipe(folder, **settings), ranks, place)
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
                assert off < 1e-5, (name, off)
            for name, metric in want.metrics.items():
                assert metrics[name].value == pytest.approx(metric.value, rel=1e-4), name
            assert all(step == steps[0] for step in steps)
            assert steps[0][1] == pytest.approx(want.norm, rel=1e-4)
