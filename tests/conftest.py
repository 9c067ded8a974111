"""Fixtures of the tests that cross packages."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Qwen2 of tied embeddings, and its tokenizer with a chat template. Nobody writes into it."""
    from coupler.testing.models import write_qwen2

    return write_qwen2(tmp_path_factory.mktemp("qwen2"), tied=True)
