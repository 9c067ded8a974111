from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from helpers import CONFIGS, write_model


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write a tiny model of this family, once."""
    return cache(lambda name: write_model(tmp_path_factory.mktemp(name), CONFIGS[name]))
