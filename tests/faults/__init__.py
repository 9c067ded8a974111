"""Generators of faults: one module for each class of them.

Each module makes its cases from a seed, tries them and prints those that came through:

    python -m tests.faults.MODULE SEED CASES

CI runs a sample of each class (``tests/test_faults.py``) whose seed ``ci_seed`` takes
from the sources, so that every change is tried with other cases and a failure can be
repeated.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEED = "COUPLER_FAULT_SEED"


def ci_seed(name: str) -> int:
    """Return the seed of a sample in CI, and print it.

    It is ``COUPLER_FAULT_SEED`` where that is set, else a hash of every source under
    ``packages``. ``name`` makes the seeds of two classes differ.
    """
    digest = hashlib.sha256(name.encode())
    for file in sorted((ROOT / "packages").glob("*/src/**/*.py")):
        digest.update(file.read_bytes())
    seed = int(os.environ.get(SEED) or int.from_bytes(digest.digest()[:4], "big"))
    print(f"faults: {name} {SEED}={seed}")
    return seed


def run(check: Callable[[int, int], Iterable[str]], cases: int) -> None:
    """Run ``check(seed, cases)`` from the command line, and print what it yields.

    ``check`` yields one line for each case that came through. The process ends with
    code 1 if there was one.
    """
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    cases = int(sys.argv[2]) if len(sys.argv) > 2 else cases

    came_through = 0
    for line in check(seed, cases):
        came_through += 1
        print(line, flush=True)
    print(f"seed {seed}: {came_through} of {cases} cases came through")
    sys.exit(came_through > 0)
