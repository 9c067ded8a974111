"""Try a sample of every class of faults."""

from __future__ import annotations

from importlib import import_module

import pytest
from tests.faults import ci_seed

# One of "processes": its cases start Ray, and take a minute each.
SAMPLES = {
    "answers": 60,
    "backends": 3,
    "blame": 2,
    "control_text": 60,
    "datasets": 3,
    "disks": 2,
    "environments": 2,
    "hostile_files": 3,
    "plugins": 2,
    "processes": 1,
    "rewards": 3,
    "run_folders": 2,
    "sampling": 60,
    "settings": 30,
    "strangers": 6,
}


@pytest.mark.parametrize("name", SAMPLES)
def test_no_case_comes_through(name: str) -> None:
    check = import_module(f"tests.faults.{name}").check
    assert list(check(ci_seed(name), SAMPLES[name])) == []
