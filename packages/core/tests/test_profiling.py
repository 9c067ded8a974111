from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coupler.config.checks import problems
from coupler.config.schema import Job, ProfileConfig, RunConfig
from coupler.worker.torch.profiling import Profile


def test_what_nobody_asked_for_imports_nothing() -> None:
    code = (
        "import sys; from coupler.worker.torch.profiling import Profile\n"
        "with Profile((0,), (3,), 'x').of('policy', 0, 2), Profile((0,), (3,), "
        "'x').of('policy', 1, 3): pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("key", ["steps", "ranks"])
def test_steps_and_ranks_count_from_0(key: str) -> None:
    config = RunConfig(profile=ProfileConfig(**{key: [3, -1]}))
    assert f"profile.{key} counts from 0, got -1." in list(problems(config, Job.TRAIN))


def test_a_wanted_step_is_traced(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    profile = Profile((1,), (2, 3), str(tmp_path / "traces"))
    for rank in (0, 1):
        for step in (1, 2):
            with profile.of("critic", rank, step):
                torch.ones(8) @ torch.ones(8)
    assert [path.name for path in (tmp_path / "traces").iterdir()] == [
        "critic-rank1-step2.trace.json"
    ]
