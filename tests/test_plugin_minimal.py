"""A third party's repository, as published: it conforms without a change to core, and the guide shows its code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "examples" / "plugin-minimal"
FILES = ("pyproject.toml", "src/coupler_rollout_minimal/plugin.py", "src/coupler_rollout_minimal/rollout.py")


@pytest.mark.parametrize("file", FILES)
def test_the_guide_shows_the_code(file: str) -> None:
    assert (PLUGIN / file).read_text().rstrip() in (ROOT / "docs" / "write-a-plugin.md").read_text()


def test_the_minimal_plugin_conforms(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{PLUGIN / 'src'}:{os.environ.get('PYTHONPATH', '')}",
        "COUPLER_PLUGINS": "coupler_rollout_minimal.plugin",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    done = subprocess.run(
        [*command, "--pyargs", "coupler.testing.conformance", "--coupler=rollout=minimal"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
