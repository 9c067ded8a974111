"""``profile.ranks`` and ``profile.steps`` of a job on engine=fsdp: traces of these, and
of no others.
"""

from __future__ import annotations

import json
from pathlib import Path

from job_run import run

JOB = ("algorithm.kl=none", "checkpoint.export=false", "trackers=[jsonl]")


def test_named_ranks_and_steps_are_traced(model: Path, tmp_path: Path) -> None:
    """Steps 0 and 2 of three on rank 0, with all that the engine did; nothing where
    another rank is named.
    """
    folder = tmp_path / "traces"
    run("train", model, tmp_path / "run", *JOB, "profile.steps=[0,2,7]", f"profile.path={folder}")
    assert {path.name for path in folder.iterdir()} == {
        f"policy-rank0-step{step}.trace.json" for step in (0, 2)
    }
    for path in folder.iterdir():
        names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
        assert names & {"aten::mm", "aten::addmm"} and "Optimizer.step#AdamW.step" in names, path
    other = run(
        "train",
        model,
        tmp_path / "other",
        *JOB,
        "steps=1",
        "profile.steps=[0]",
        "profile.ranks=[1]",
    )
    assert not (other / "profile").exists()
