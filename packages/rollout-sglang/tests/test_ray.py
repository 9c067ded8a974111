"""Two replicas under Ray, one of which is killed amid the run."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_faults import children, kill, title
from test_train import arguments, logged

from coupler.testing.reference import TransformersReference


@pytest.mark.slow
def test_a_run_goes_on_when_the_engine_of_a_replica_is_killed(
    kernels: None, tmp_path: Path, reference: TransformersReference
) -> None:
    """The other one samples what it was sampling, and every step trains on whole
    groups.
    """
    train = arguments(tmp_path, reference, "executor=ray", "rollout.replicas=2")
    run, said = tmp_path / "run", tmp_path / "said"
    command = [sys.executable, "-m", "coupler.cli", *train, "trackers=[console,jsonl]"]
    with said.open("w") as out, subprocess.Popen(command, stdout=out) as job:
        try:
            until = time.monotonic() + 300
            while not (run / "metrics.jsonl").exists() or not logged(tmp_path):
                assert job.poll() is None and time.monotonic() < until, said.read_text()
                time.sleep(0.05)

            (replica,) = re.findall(
                r"^pid (\d+) on node", (run / "logs" / "rollout-0.log").read_text()
            )
            (manager,) = children(int(replica))
            for pid in children(manager):
                if title(pid).startswith("sglang::scheduler"):
                    kill(pid)
            assert job.wait(300) == 0
        finally:
            job.kill()

    assert said.read_text().count("rollout replica 0 died; starting it again") == 1
    log = logged(tmp_path)
    assert [step["step"] for step in log] == [0, 1, 2, 3]
    for step in log[1:]:
        assert step["batch/sequences"] == 8 and step["staleness/max"] == 0
        assert step["train_infer/abs_diff"] < 1e-3
