"""An engine that nobody asks anything leaves the processor to others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from test_faults import children, process

from coupler.testing.edge import Served

WAIT_S = 3.0
MOST_S = 0.5  # of processor time; a scheduler that polls without a pause takes all of it


def processor_s(pid: int) -> float:
    """Seconds that a process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_an_idle_engine_computes_nothing(served: Served) -> None:
    manager = process(served.rollout, "manager")
    pids = [manager, *children(manager)]
    before = sum(map(processor_s, pids))
    time.sleep(WAIT_S)
    assert sum(map(processor_s, pids)) - before < MOST_S
