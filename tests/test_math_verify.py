r"""Rewards of math-verify, in their sandbox, on what models write."""

from __future__ import annotations

from functools import cache

import pytest

from coupler.rewards import Graded, Invalid, check_reward, sandbox
from coupler.rewards.math_verify import Score

pytest.importorskip("math_verify", reason="the extra math is not installed")

TARGET = "coupler.rewards.math_verify:Score"
score = cache(Score)


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


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"\boxed{2\sqrt{3}}", r"2\sqrt{3}", 1.0),
        (r"\boxed{2}", r"2\sqrt{3}", 0.0),
        (r"\boxed{1 + x^2}", "x^2 + 1", 1.0),
        (r"\boxed{1}", "x^2 + 1", 0.0),
        (r"\boxed{3\pi}", r"3\pi", 1.0),
        (r"\boxed{(3, 4)}", "(3, 4)", 1.0),
        (r"\boxed{4}", "(3, 4)", 0.0),
        (
            r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}",
            r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
            1.0,
        ),
        (r"\boxed{2}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", 0.0),
        ("so 5", "5 apples", 1.0),
        ("it is 1,000", "1,000", 1.0),
        (r"\boxed{5}", r"5\text{ cm}", 1.0),
        (r"\boxed{90^\circ}", r"90^\circ", 1.0),
        ("so $x = 5$", "x=5", 1.0),
    ],
)
def test_an_answer_may_be_a_bare_formula_a_number_or_a_text(
    completion: str, answer: str, reward: float
) -> None:
    found = score()(completion, answer)
    assert isinstance(found, Graded) and found.reward == reward


def test_an_answer_without_mathematics_is_the_rows_fault() -> None:
    (one,) = check_reward(TARGET, [("8", "", {})], 20.0)
    assert one.result == Invalid("math-verify reads no mathematics in the answer ''")


def test_it_is_killed_where_a_formula_takes_too_long() -> None:
    hard = r"\boxed{\sum_{k=1}^{10^9} \frac{1}{k}}"
    first, last = check_reward(TARGET, [(hard, "8", {}), ("8", "8", {})], 3.0)
    assert (first.result, last.result) == (Invalid("took longer than 3 s"), 1.0)
    assert "sympy" in first.detail, "it says where"


def test_it_asks_for_a_sandbox() -> None:
    assert Score.sandbox
    assert sandbox.kind(), sandbox.why_none()
    assert Score()("1", "1") == Graded(1.0, "1")
