"""Models with their references, and engines on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from families import CONFIGS, References, Start, references

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
