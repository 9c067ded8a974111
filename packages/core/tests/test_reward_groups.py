"""Rewards of all completions of a prompt at once, and the parts of which rewards are
made.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coupler.errors import CouplerError, RewardError
from coupler.rewards import Invalid, RewardPool, Scored, check_reward

REWARDS = """
import os, time
from coupler.rewards import Graded, Invalid

def ranked(completions, answer, row):
    order = sorted(completions)
    return [Graded(order.index(c), c, {"length": len(c)}) for c in completions]

def mixed(completions):
    return [{"x": 1.0, "nan": float("nan"), "none": Invalid("why")}[c] for c in completions]

def rows(completions, row, prompt): return [row["number"] + len(prompt)] * len(completions)
def tensor(completions):
    import numpy
    return numpy.arange(len(completions))
def fewer(completions): return [1.0]
def text(completions): return "ab"
def a_dict(completions): return {"reward": 1.0}
def number(completions): return 2.0
def endless(completions):
    while True: yield 1.0
def raises(completions): raise KeyError("no")
def hangs(completions): time.sleep(60)
def dies(completions): os._exit(3)
def both(completion, completions): return 0
def anything(**given): return float("completions" not in given)
def listed(completions, answer): return [[1.0, 2.0]] * len(completions)

def parts(completion):
    return {
        "good": {"reward": 1, "format": True, "length": 3},
        "bare": 1.0,
        "other": {"reward": 1, "form": 1},
        "no reward": {"format": 1},
        "not finite": {"reward": 1, "format": float("inf")},
        "a text": {"reward": 1, "format": "yes"},
        "a name": {"reward": 1, "a b": 1},
        "no name": {"reward": 1, 3.5: 1, (): 1},
        "many": {"reward": 1, **{f"p{i}": i for i in range(99)}},
        "nested": {"reward": {"reward": 1}},
        "no number": {"reward": None, "format": 1},
    }[completion]
"""
TEXTS = ["bb", "a", "ccc"]


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    (tmp_path / "groups.py").write_text(REWARDS)
    return str(tmp_path / "groups.py")


def scored(target: str, texts: list[str], workers: int = 1, times: int = 1) -> list[list[Scored]]:
    pool = RewardPool(target, workers, 3.0, 1.0)

    async def ask() -> list[list[Scored]]:
        row = {"prompt": "p", "number": 7}
        return await asyncio.gather(*(pool.score_group(texts, "a", row) for _ in range(times)))

    try:
        pool.start()
        assert pool.takes_group
        return asyncio.run(ask())
    finally:
        pool.close()


def reasons(target: str) -> set[str]:
    (found,) = scored(target, TEXTS)
    assert len(found) == len(TEXTS)
    results = [one.result for one in found]
    return {one.reason if isinstance(one, Invalid) else str(one) for one in results}


def test_all_are_scored_at_once(rewards: str) -> None:
    for found in scored(f"{rewards}:ranked", TEXTS, workers=3, times=40):
        assert [(one.result, one.answer, one.parts) for one in found] == [
            (1.0, "bb", {"length": 2.0}),
            (0.0, "a", {"length": 1.0}),
            (2.0, "ccc", {"length": 3.0}),
        ]


def test_a_group_has_the_row_and_any_sequence(rewards: str) -> None:
    assert [one.result for one in scored(f"{rewards}:rows", TEXTS)[0]] == [8.0] * 3
    assert [one.result for one in scored(f"{rewards}:tensor", TEXTS)[0]] == [0.0, 1.0, 2.0]
    assert scored(f"{rewards}:ranked", []) == [[]]


def test_one_without_a_number_leaves_the_others(rewards: str) -> None:
    (found,) = scored(f"{rewards}:mixed", ["x", "nan", "none"])
    assert [one.result for one in found] == [1.0, Invalid("returned nan"), Invalid("why")]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fewer", "returned 1 rewards for 3 completions"),
        ("endless", "returned more than 3 rewards for 3 completions"),
        ("text", "returned a str, not 3 rewards"),
        ("a_dict", "returned a dict, not 3 rewards"),
        ("number", "returned a float, not 3 rewards"),
        ("raises", "KeyError: 'no'"),
        ("hangs", "took longer than 3 s"),
        ("dies", "its process exited with code 3"),
        ("listed", "returned a list, not a number"),
    ],
)
def test_a_group_that_cannot_be_scored_is_invalid(rewards: str, name: str, reason: str) -> None:
    assert reasons(f"{rewards}:{name}") == {reason}


def test_its_signature_says_which_it_is(rewards: str) -> None:
    with pytest.raises(CouplerError, match="takes both completion and completions"):
        check_reward(f"{rewards}:both", [("x", "a", {})], 5.0)
    (one,) = check_reward(f"{rewards}:anything", [("x", "a", {})], 5.0)
    assert one.result == 1.0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no reward", "returned a dict without the key reward"),
        ("not finite", "returned inf, as the part format"),
        ("a text", "returned a str, not a number, as the part format"),
        ("a name", "returned a part 'a b', whose name is none"),
        ("no name", "returned a part '()', whose name is none"),
        ("many", "returned 99 parts, more than 64"),
        ("nested", "returned a dict, not a number"),
        ("no number", "returned a NoneType, not a number"),
    ],
)
def test_parts_are_numbers_with_names(rewards: str, text: str, reason: str) -> None:
    (one,) = check_reward(f"{rewards}:parts", [(text, "a", {})], 5.0)
    assert one.result == Invalid(reason)


@pytest.mark.parametrize("text", ["bare", "other"])
def test_a_reward_gives_the_same_parts_each_time(rewards: str, text: str) -> None:
    pool = RewardPool(f"{rewards}:parts", 1, 5.0, 1.0)

    async def ask() -> None:
        first = await pool.score("good", "a", {})
        assert (first.result, first.parts) == (1.0, {"format": 1.0, "length": 3.0})
        await pool.score("no reward", "a", {})
        with pytest.raises(RewardError, match="not format, length"):
            await pool.score(text, "a", {})

    try:
        pool.start()
        asyncio.run(ask())
    finally:
        pool.close()
