"""A run that learns nothing says so once, with the likely reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coupler.batch import Batch
from coupler.run.learning import STEPS, LearningWatch

# a step of a run that learns
GOOD = {
    "batch/truncated": 0.1, "reward/min": 0.0, "reward/mean": 0.4, "reward/max": 1.0,
    "advantages/min": -1.0, "advantages/max": 1.0, "train/grad_norm": 0.3, "entropy": 1.5,
}  # fmt: skip


LEVEL = {"advantages/min": 0.0, "advantages/max": 0.0}


def lines(step: int, batch: Batch, rows: Any) -> list[dict[str, Any]]:
    return [
        {"step": step, "reward": 0.0, "finish": "stop", "prompt": "p", "completion": f"text {row}"}
        for row in rows
    ]


def said(*steps: dict[str, float]) -> list[str]:
    """Return what a watch says after each step."""
    watch = LearningWatch(32, lines)
    watch.batch = Batch(np.ones(8, np.int64), {}, {"group": np.repeat([4, 5, 6, 7], 2)})
    return [watch.judge(i + 1, step) for i, step in enumerate(steps)]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"batch/truncated": 1.0}, "every completion was cut at the limit of tokens, sampling.max"),
        (LEVEL | {"reward/min": 0.4, "reward/max": 0.4}, "every completion got the same reward, 0"),
        (LEVEL, "all completions of a prompt got equal"),
        ({"train/grad_norm": 0.0}, "the gradient was 0, although rewards differ."),
    ],
)
def test_it_says_once_why_with_three_completions(bad: dict[str, float], why: str) -> None:
    found = said(GOOD, *[GOOD | bad] * (STEPS + 3))
    (text,) = filter(None, found)
    assert found.index(text) == STEPS, "not before so many steps in a row"
    assert text.startswith(f"the run learns nothing: in the last {STEPS} steps {why}")
    assert [f"text {row}" in text for row in range(8)] == [True, False, True, False, True] + [
        False
    ] * 3


@pytest.mark.parametrize("bad", [{"batch/truncated": 1.0}, {"train/grad_norm": 0.0}])
def test_one_good_step_between_is_enough(bad: dict[str, float]) -> None:
    almost = [GOOD | bad] * (STEPS - 1)
    assert not any(said(*almost, GOOD, *almost))


def test_an_entropy_that_collapses_is_named_and_one_that_falls_is_not() -> None:
    start, steps = [GOOD] * STEPS, range(STEPS)
    (text,) = filter(None, said(*start, *(GOOD | {"entropy": 0.02} for _ in steps)))
    assert "the entropy was at most 0.02 nats a token, and 1.5 at first" in text
    assert not any(said(*start, *(GOOD | {"entropy": 0.2} for _ in steps)))
    low = [GOOD | {"entropy": 0.02}] * (2 * STEPS)
    assert not any(said(*low)), "it was so at the start"


def test_a_step_without_a_metric_is_no_reason() -> None:
    nothing = {name: value for name, value in GOOD.items() if name != "train/grad_norm"}
    assert not any(said(*[nothing] * (2 * STEPS)))


def test_answers_that_are_learnt_are_something_to_learn_from() -> None:
    bad = GOOD | LEVEL | {"reward/min": 0.4, "reward/max": 0.4}
    assert not any(said(*[bad | {"nll_demo": 2.0}] * (STEPS + 3)))
    assert any(said(*[bad] * (STEPS + 3)))


def test_a_teacher_s_advantages_are_something_to_learn_from() -> None:
    """A run that distils may have a reward that never changes."""
    assert not any(said(*[GOOD | {"reward/min": 0.4, "reward/max": 0.4}] * (STEPS + 3)))
