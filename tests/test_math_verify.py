r"""Rewards of math-verify, in their sandbox, on what models write."""

from __future__ import annotations

import pytest

from coupler.rewards import Graded, Invalid, check_reward, sandbox

pytest.importorskip("math_verify", reason="the extra math is not installed")

TARGET = "coupler.rewards.math_verify:Score"


@pytest.mark.parametrize(
    ("completion", "answer", "reward", "read"),
    [
        (r"so it is $\boxed{\frac12}$.", "0.5", 1.0, r"\frac{1}{2}"),
        ("The answer is 42.", "42", 1.0, "42"),
        ("1,000 or 1001", "1000", 0.0, "1001"),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0, "x^2 + 2x + 1"),
        (r"first 7, then \boxed{8}", "8", 1.0, "8"),
        ("I do not know", "8", 0.0, ""),
        ("7 " * 5000 + "8", "8", 1.0, "8"),
    ],
)
def test_equal_mathematics_is_one(completion: str, answer: str, reward: float, read: str) -> None:
    (one,) = check_reward(TARGET, [(completion, answer, {})], 20.0)
    assert (one.result, one.answer) == (reward, read)


def test_an_answer_without_mathematics_is_the_rows_fault() -> None:
    (one,) = check_reward(TARGET, [("8", "", {})], 20.0)
    assert one.result == Invalid("math-verify reads no mathematics in the answer ''")


def test_it_is_killed_where_a_formula_takes_too_long() -> None:
    hard = r"\boxed{\sum_{k=1}^{10^9} \frac{1}{k}}"
    first, last = check_reward(TARGET, [(hard, "8", {}), ("8", "8", {})], 3.0)
    assert (first.result, last.result) == (Invalid("took longer than 3 s"), 1.0)
    assert "sympy" in first.detail, "it says where"


def test_it_asks_for_a_sandbox() -> None:
    from coupler.rewards.math_verify import Score

    assert Score.sandbox
    assert sandbox.kind(), sandbox.why_none()
    assert Score()("1", "1") == Graded(1.0, "1")
