"""One run in two environments that hold different torch versions:
``rollout.python=PATH``.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from job_run import reproducible, run

ROOT = Path(__file__).parents[1]
UV = Path(sys.prefix).parent / ".tools" / "bin" / "uv"
VERSION = "from importlib.metadata import version; print(version('torch'))"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with core, engine-fsdp, the same Ray and
    another torch.
    """
    if not UV.is_file():
        pytest.skip("needs uv in .tools/bin; make lint puts it there")
    folder = tmp_path_factory.mktemp("other")
    python = folder / "venv" / "bin" / "python"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, folder / "venv"], check=True)
    older = f"torch<{version('torch').partition('+')[0]}"
    packages = [ROOT / "packages" / "core", ROOT / "packages" / "engine-fsdp"]
    same = [f"{name}=={version(name)}" for name in ("ray", "transformers")]
    install = [UV, "pip", "install", "--quiet", "--no-config", "--python", python, older]
    subprocess.run(
        [*install, *same, *packages], check=True, cwd=folder
    )  # away from the workspace's constraints
    return python


@pytest.mark.slow  # rollout-vllm's tests have an engine and vLLM in environments of their own
def test_the_rollout_runs_in_an_environment_of_its_own(
    other: Path, model: Path, tmp_path: Path
) -> None:
    there = subprocess.run(
        [other, "-c", VERSION], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert there != version("torch")
    options = ("algorithm.kl=none", "steps=2")
    one = run("train", model, tmp_path / "one" / "run", *options)
    two = run(
        "train",
        model,
        tmp_path / "two" / "run",
        *options,
        "executor=ray",
        f"rollout.python={other}",
    )
    for a, b in zip(reproducible(one), reproducible(two), strict=True):
        assert b == pytest.approx(a, rel=1e-4, abs=1e-6)
    assert str(other) in (two / "logs" / "rollout-0.log").read_text()
    assert sys.executable in (two / "logs" / "policy-0.log").read_text()
