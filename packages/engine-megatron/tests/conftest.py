"""Models with their references, and engines on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from families import CONFIGS, References, Start
from transformers import AutoModelForCausalLM

from coupler.testing.models import write_random
from coupler.testing.ranks import World
from coupler.testing.reference import TransformersReference


@pytest.fixture(scope="session")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> References:
    """Write a small model of this name, once."""

    @cache
    def make(name: str) -> TransformersReference:
        folder = tmp_path_factory.mktemp(name)
        return TransformersReference(write_random(AutoModelForCausalLM.from_config(CONFIGS[name]), folder, 0))

    return make


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[World] = []

    def make(folder: Path, ranks: int = 1, **settings: object) -> World:
        recipe = {
            "target": "coupler_engine_megatron.engine:MegatronEngine",
            "config": "coupler_engine_megatron.config:MegatronConfig",
            "settings": {"lr": 1e-3, "max_tokens_per_gpu": 28, **settings},
            "model": str(folder),
            "head": "lm",
        }
        place = tmp_path / f"world-{len(made)}"
        place.mkdir()
        made.append(World(recipe, ranks, place))
        return made[-1]

    yield make
    for world in made:
        world.close()
