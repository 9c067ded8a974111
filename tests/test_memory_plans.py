"""The kit holds plans of memory against what is taken: the test that is about a fault
catches each faulty plan.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from faulty_plans import CAUGHT_BY, HONEST

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow
Outcomes = dict[str, dict[str, str]]  # what each test said, by the name of the engine


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Run the kit on each faulty plan with the test that must catch it."""
    folder = tmp_path_factory.mktemp("plans")
    report = folder / "report.xml"
    chosen = [f"--coupler=engine={name},untied" for name in (*HONEST, *CAUGHT_BY)]
    tests = [f"({name} and test_memory_plan)" for name in HONEST]
    tests += [f"({name} and {test})" for name, test in CAUGHT_BY.items()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", "--pyargs", "coupler.testing.conformance"]
    environment = {
        **os.environ,
        "COUPLER_PLUGINS": "faulty_plans",
        "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        [*command, "-k", " or ".join(tests), *chosen],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert report.exists(), done.stdout + done.stderr

    found: Outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        test, _, parameters = case.attrib["name"].partition("[")
        name = parameters.partition("=")[2].partition(",")[0]
        said = next((f"{each.tag}: {each.attrib['message']}" for each in case), "")
        seen = found.setdefault(name, {})
        seen[test] = "\n".join(filter(None, (seen.get(test), said)))
    return found


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_a_faulty_plan_is_caught(outcomes: Outcomes, name: str) -> None:
    said = outcomes[name][CAUGHT_BY[name]]
    assert said.startswith("failure: AssertionError: expected "), said


def test_a_right_plan_passes(outcomes: Outcomes) -> None:
    assert outcomes["Honest"] == dict.fromkeys(CAUGHT_BY.values(), "")


def test_a_plan_of_a_part_is_skipped(outcomes: Outcomes) -> None:
    sentence = "plans a part of its memory: its kernels' workspace"
    found = outcomes["KnowsAPart"]
    assert found.keys() == set(CAUGHT_BY.values())
    assert all(sentence in said and said.startswith("skipped") for said in found.values()), found
