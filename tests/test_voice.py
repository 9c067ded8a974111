"""The counters of how the sources read: none rises, and the counters count what they
say.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def load() -> Any:
    spec = importlib.util.spec_from_file_location("voice", ROOT / "benchmarks" / "voice.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


voice = load()
KEPT: dict[str, dict[str, float]] = json.loads(voice.KEPT.read_text())
SAMPLE = '''
"""Of things; and of others."""

@dataclass
class AcmeConfig:
    a: int = 0  # of the last rank
    b: int = 0  # Layers on the last stage.
    c: int = 0
    """as under engine.lr"""

def short():
    return 1

def long():
    """See :meth:`short`."""
''' + "".join(f"    x = {number}\n" for number in range(12))


@pytest.fixture(scope="module")
def now() -> dict[str, dict[str, float]]:
    return voice.measure()


def test_every_package_is_counted(now: dict[str, dict[str, float]]) -> None:
    assert now.keys() == KEPT.keys(), "write the file anew:  python benchmarks/voice.py --write"


@pytest.mark.parametrize("counter", voice.COUNTERS)
def test_no_counter_rises(counter: str, now: dict[str, dict[str, float]]) -> None:
    """Hold each within a hundredth: what removes a line may move a share that much."""
    risen = {
        name: f"{KEPT[name][counter]} -> {now[name][counter]}"
        for name in KEPT
        if now[name][counter] > 1.01 * KEPT[name][counter]
    }
    assert not risen, (
        f"{voice.COUNTERS[counter]}: rewrite what you added; python benchmarks/voice.py prints all"
    )


@pytest.mark.parametrize("counter", voice.COUNTERS)
def test_a_large_fall_is_kept(counter: str, now: dict[str, dict[str, float]]) -> None:
    """Hold a fall of more than a tenth. Any change of length brings a smaller one."""
    fallen = {
        name: f"{KEPT[name][counter]} -> {now[name][counter]}"
        for name in KEPT
        if now[name][counter] < 0.9 * KEPT[name][counter]
    }
    assert not fallen, "it reads better: keep that with  python benchmarks/voice.py --write"


def test_what_is_counted() -> None:
    total = voice.count_source(SAMPLE)
    wanted = {
        "docstrings": 2,
        "openers": 2,
        "semicolons": 1,
        "options": 3,
        "leaning": 2,
        "lower": 2,
    }
    wanted |= {"functions": 1, "solid": 1, "doc lines": 2}
    assert {name: total[name] for name in wanted} == wanted


def test_a_blank_line_and_a_short_docstring_count() -> None:
    better = SAMPLE.replace("    x = 6\n", "\n    x = 6\n").replace(
        "Of things; and of others.", "Hold things."
    )
    total = voice.count_source(better)
    assert (total["solid"], total["semicolons"], total["openers"]) == (0, 0, 1)


def test_a_long_docstring_line_counts() -> None:
    assert voice.count_source(f'"""{"word " * 20}"""\n')["long lines"] == 1
    assert voice.count_source(f'"""{"word " * 10}"""\n')["long lines"] == 0
