"""Models with their references, and engines on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from families import CONFIGS, References, Start, references

from coupler.interfaces import Rank
from coupler.testing.ranks import World


@pytest.fixture(scope="session")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> References:
    return references(CONFIGS, tmp_path_factory)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[World] = []

    def make(folder: Path, ranks: int = 1, deadline_s: float = 240.0, **settings: object) -> World:
        recipe = {
            "target": "coupler_engine_megatron.engine:MegatronEngine",
            "config": "coupler_engine_megatron.config:MegatronConfig",
            "settings": {"lr": 1e-3, "max_tokens_per_gpu": 28, **settings},
            "model": str(folder),
            "head": "lm",
        }
        place = tmp_path / f"world-{len(made)}"
        place.mkdir()
        made.append(World(recipe, ranks, place, deadline_s))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """A rank that chooses kernels for the whole process, until the end of the test."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    yield Rank(deterministic=True)
    torch.use_deterministic_algorithms(False)
