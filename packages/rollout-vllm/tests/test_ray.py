"""Under Ray: replicas in an interpreter of their own, with another torch beside them;
of two workers; and killed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from test_train import arguments, logged

from coupler.testing.reference import TransformersReference

ROOT = Path(__file__).parents[3]
UV = Path(sys.prefix).parents[1] / ".tools" / "bin" / "uv"
VERSION = "from importlib.metadata import version; print(version('torch'))"


@pytest.fixture(scope="module")
def training_side(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment without vLLM, with core, engine-fsdp, the same
    Ray and another torch.
    """
    if not UV.is_file():
        pytest.skip("needs uv in .tools/bin; make puts it there")
    folder = tmp_path_factory.mktemp("training")
    python = folder / "venv" / "bin" / "python"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, folder / "venv"], check=True)
    older = f"torch<{version('torch').partition('+')[0]}"
    packages = [ROOT / "packages" / name for name in ("core", "engine-fsdp", "algos")]
    same = [f"{name}=={version(name)}" for name in ("ray", "transformers")]
    install = [UV, "pip", "install", "--quiet", "--no-config", "--python", python, older]
    subprocess.run(
        [*install, *same, *packages], check=True, cwd=folder
    )  # away from the workspace's constraints
    return python


@pytest.mark.slow
def test_engine_and_vllm_in_environments_of_their_own(
    training_side: Path, tmp_path: Path, reference: TransformersReference
) -> None:
    there = subprocess.run(
        [training_side, "-c", VERSION], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert there != version("torch")
    overrides = (
        f"engine.python={training_side}",
        f"rollout.python={sys.executable}",
        "rollout.tensor_parallel=2",
    )
    train = arguments(tmp_path, reference, "executor=ray", "steps=1", *overrides)
    subprocess.run(
        [sys.executable, "-m", "coupler.cli", *train], check=True, timeout=400
    )  # here vLLM imported Ray
    log = logged(tmp_path)
    assert log[0]["sync/probe"] < 1e-3 < 1e-2 < log[0]["sync/probe_permuted"]
    assert all(step["train_infer/abs_diff"] < 1e-3 for step in log[1:])
    logs = tmp_path / "run" / "logs"
    assert str(training_side) in (logs / "policy-0.log").read_text()
    assert sys.executable in (logs / "rollout-0.log").read_text()


@pytest.mark.skipif("COUPLER_KILLS" not in os.environ, reason="takes 90 s: set COUPLER_KILLS=1")
def test_a_replica_whose_process_is_killed_comes_back(
    tmp_path: Path, reference: TransformersReference
) -> None:
    """Amid a run: the other one samples what it was sampling, and every step trains on
    whole groups.
    """
    train = arguments(tmp_path, reference, "executor=ray", "steps=8", "rollout.replicas=2")
    command = [sys.executable, "-m", "coupler.cli", *train]
    run, said = tmp_path / "run", tmp_path / "said"
    with said.open("w") as out, subprocess.Popen(command, stdout=out) as job:
        try:
            until = time.monotonic() + 300
            while not (run / "metrics.jsonl").exists() or len(logged(tmp_path)) < 3:
                assert job.poll() is None and time.monotonic() < until, said.read_text()
                time.sleep(0.05)
            (pid,) = re.findall(r"^pid (\d+) on node", (run / "logs" / "rollout-0.log").read_text())
            os.kill(int(pid), signal.SIGKILL)
            assert job.wait(300) == 0
        finally:
            job.kill()
    assert said.read_text().count("rollout replica 0 died; starting it again") == 1
    log = logged(tmp_path)
    assert [step["step"] for step in log] == list(range(9))
    for step in log[1:]:
        assert step["batch/sequences"] == 8 and step["staleness/max"] == 0
        assert step["train_infer/abs_diff"] < 1e-3
