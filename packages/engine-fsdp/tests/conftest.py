from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers import CONFIGS, write_model

from coupler.interfaces import Rank


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write a tiny model of this family, once."""
    return cache(lambda name: write_model(tmp_path_factory.mktemp(name), CONFIGS[name]))


@pytest.fixture
def deterministic() -> Iterator[Rank]:
    """A rank that must give equal bits; this process goes back to other kernels after
    the test.
    """
    yield Rank(deterministic=True)
    torch.use_deterministic_algorithms(False)
