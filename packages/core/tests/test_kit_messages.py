"""Every check of the kit says what it expected and what came."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import coupler.testing
from coupler.testing import expect

KIT = Path(coupler.testing.__file__).parent
FILES = sorted(KIT.rglob("*.py"))


def bare(source: str) -> list[int]:
    """Return the lines whose failure would say no more than that it failed."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert) and node.msg is None:
            found.append(node.lineno)
        fails = isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.fail"
        if fails and not (node.args or node.keywords):
            found.append(node.lineno)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(KIT)))
def test_every_assertion_has_a_sentence(file: Path) -> None:
    lines = bare(file.read_text())
    assert not lines, f"{file.name}: give lines {lines} a message, or use coupler.testing.expect"


def test_an_assertion_without_one_is_found() -> None:
    assert bare("assert x\nassert x, 'why'\npytest.fail()\npytest.fail('why')\n") == [1, 3]


@pytest.mark.parametrize(
    ("check", "sentence"),
    [
        (lambda: expect.same(1, 2, "the version"), "expected the version to be 2, came 1"),
        (lambda: expect.near(1.5, 1.0, "the norm"), "expected the norm to be 1, came 1.5"),
        (lambda: expect.below(np.nan, 1, "an error"), "expected an error below 1, came nan"),
        (lambda: expect.above(0.0, 1, "the move"), "expected the move above 1, came 0"),
        (lambda: expect.holds(False, "a step to be applied"), "expected a step to be applied"),
        (lambda: expect.holds([], "a token", 3), "expected a token, came 3"),
        (
            lambda: expect.finite({"loss": np.array([1, np.nan])}, "a batch"),
            "expected finite numbers in loss of a batch, 1 are not",
        ),
        (
            lambda: expect.zero({"loss": np.array([0, -2.0])}, "here"),
            "expected loss to be 0 here, came up to 2",
        ),
        (
            lambda: expect.moves({"loss": np.zeros(2)}, "a gradient"),
            "expected a gradient, came zeros alone in ['loss']",
        ),
        (lambda: expect.alike([1, 1, 2], "answers"), "expected answers to be equal, came 1 and 2"),
        (
            lambda: expect.numbers({"a": 1.0}, {"b": 1.0}, "the metrics", 1e-6),
            "expected the metrics to have b, it has ['a']",
        ),
    ],
)  # fmt: skip
def test_a_sentence_says_what_was_expected_and_what_came(check: object, sentence: str) -> None:
    assert callable(check)
    with pytest.raises(AssertionError) as raised:
        check()
    assert str(raised.value).splitlines()[0] == sentence


def test_what_is_right_passes() -> None:
    expect.same(1, 1, "x")
    expect.near(1.0, 1.0 + 1e-9, "x")
    expect.below(0, 1, "x")
    expect.above(2, 1, "x")
    expect.holds(True, "x")
    expect.finite({"x": np.ones(2), "none": np.zeros(0)}, "x")
    expect.zero({"x": np.zeros(2), "none": np.zeros(0)}, "x")
    expect.moves({"x": np.ones(2)}, "x")
    expect.alike([1, 1], "x")
    expect.alike([], "x")
    expect.numbers({"a": 1.0, "b": 2.0}, {"a": 1.0}, "x", 1e-6)
