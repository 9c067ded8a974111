"""The guide shows the code of the smallest example; ``test_examples.py`` installs and
runs it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "examples" / "plugin-minimal"
FILES = (
    "pyproject.toml",
    "src/coupler_rollout_minimal/plugin.py",
    "src/coupler_rollout_minimal/rollout.py",
)


@pytest.mark.parametrize("file", FILES)
def test_the_guide_shows_the_code(file: str) -> None:
    assert (PLUGIN / file).read_text().rstrip() in (ROOT / "docs" / "write-a-plugin.md").read_text()
