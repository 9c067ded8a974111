"""Check what every reward must do: give a number, ``Graded`` or ``Invalid`` for
whatever a model writes, in time.

A reward is a function, no backend: ``--coupler reward=package.module:function``. Where
it reads columns of its own task, ``--coupler
reward=package.module:function,rows=rows.jsonl`` names some rows.
"""

from __future__ import annotations

import re

import pytest

from coupler.rewards.result import Invalid, Scored
from coupler.testing.rewards import LONG, RewardSubject

# The process that calls a reward writes this reason.
NO_NUMBER = re.compile(r"returned (a \w+, not a number|nan|-?inf)")


@pytest.fixture(scope="module")
def scored(reward_subject: RewardSubject) -> dict[str, Scored]:
    return reward_subject.score(reward_subject.calls())


def test_no_completion_makes_it_raise(scored: dict[str, Scored]) -> None:
    """A run contains the exception and counts it as invalid. Above 1 % of these it
    ends.
    """
    for what, one in scored.items():
        raised = isinstance(one.result, Invalid) and one.detail and not one.timed_out
        assert not raised, (
            f"expected a number or Invalid on {what}, came an exception:\n{one.detail}"
        )


def test_what_it_returns_is_a_number_graded_or_invalid(scored: dict[str, Scored]) -> None:
    for what, one in scored.items():
        reason = one.result.reason if isinstance(one.result, Invalid) else ""
        assert not NO_NUMBER.fullmatch(reason), (
            f"expected a finite number, Graded or Invalid on {what}: it {reason}"
        )


def test_every_call_ends_in_time(reward_subject: RewardSubject, scored: dict[str, Scored]) -> None:
    """Some completions have 100,000 characters, which a pattern that backtracks does
    not survive.
    """
    limit = reward_subject.timeout_s
    late = {what: one.seconds for what, one in scored.items() if one.timed_out}
    assert not late, (
        f"expected every call within {limit:g} s, longer took {', '.join(late)} ({LONG} characters)"
    )


def test_something_is_a_number(scored: dict[str, Scored]) -> None:
    """Each row's own answer gets a number at least, unless all rows are foreign to the
    reward.
    """
    reasons = {one.result.reason for one in scored.values() if isinstance(one.result, Invalid)}
    assert any(not isinstance(one.result, Invalid) for one in scored.values()), (
        f"expected a number for some completion, came only Invalid: {', '.join(sorted(reasons))}\n"
        "  try:  --coupler reward=TARGET,rows=FILE.jsonl with rows of its task"
    )


def test_equal_calls_give_equal_rewards(
    reward_subject: RewardSubject, scored: dict[str, Scored]
) -> None:
    """Rewards are equal in another process and another order too: a resumed run scores
    as the first one did.
    """
    if any(one.timed_out for one in scored.values()):
        pytest.skip("a call that takes too long has no result to compare")
    calls = reward_subject.calls()
    again = reward_subject.score(dict(reversed(calls.items())))
    for what, one in scored.items():
        first, second = (one.result, one.answer), (again[what].result, again[what].answer)
        assert first == second, (
            f"expected the same on {what} in another process and order, came {first}, {second}"
        )
