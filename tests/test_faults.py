"""Try a sample of every class of faults."""

from __future__ import annotations

from importlib import import_module

import pytest
from tests.faults import ci_seed

# One of "processes": its cases start Ray, and take a minute each.
SAMPLES = {
    "answers": 60,
    "backends": 8,
    "blame": 6,
    "control_text": 60,
    "datasets": 8,
    "disks": 6,
    "environments": 4,
    "hostile_files": 8,
    "plugins": 6,
    "processes": 1,
    "rewards": 6,
    "run_folders": 6,
    "sampling": 60,
    "settings": 60,
    "strangers": 12,
}


@pytest.mark.parametrize("name", SAMPLES)
def test_no_case_comes_through(name: str) -> None:
    check = import_module(f"tests.faults.{name}").check
    assert list(check(ci_seed(name), SAMPLES[name])) == []
