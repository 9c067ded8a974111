"""Several reward functions at once: named, weighted, and chosen by the source of a
row.
"""

from __future__ import annotations

import asyncio
from math import isnan
from pathlib import Path
from typing import Any

import pytest

from coupler.errors import ConfigError, CouplerError, RewardError
from coupler.rewards import Invalid, Scored, check_rewards, make_scoring
from coupler.rewards.functions import check_sources
from coupler.rewards.options import RewardConfig

REWARDS = """
from coupler.rewards import Graded

def right(completion, answer): return Graded(float(completion == answer), completion)
def parts(completion): return {"reward": len(completion), "letters": 1.0, "digits": 2.0}
def other_parts(completion): return {"reward": 0, "letters" if completion == "a" else "x": 1.0}
def scaled(completion, scale): return scale
def ranked(completions, row): return [sorted(completions).index(text) for text in completions]
def judged(completion, verdict): return float(verdict == completion)
def raises(completion): raise ValueError("no luck")
def huge(completion): return 3e38
def mine(completions, **columns): return [None if text == "a" else 1.0 for text in completions]
def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 8.0
"""


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    (tmp_path / "several.py").write_text(REWARDS)
    return str(tmp_path / "several.py")


def config(rewards: str, **functions: dict[str, Any]) -> RewardConfig:
    """Name functions of the file by their own names, where nothing else is said."""
    named = {name: {"target": f"{rewards}:{name}", **more} for name, more in functions.items()}
    return RewardConfig(functions=named)


def asked(
    settings: RewardConfig, texts: list[str], row: dict[str, Any], answer: str = "a"
) -> list[Scored]:
    scoring = make_scoring(settings, ["verdict"] if "verdict" in row else [])
    scoring.start()
    try:
        return asyncio.run(scoring.score_group(texts, answer, row))
    finally:
        scoring.close()


def test_numbers_are_added_by_weight(rewards: str) -> None:
    settings = config(
        rewards, right={"weight": 2}, parts={"weight": -0.5}, scaled={"args": {"scale": 10}}
    )
    first, second = asked(settings, ["a", "bb"], {})
    assert (first.result, second.result) == (2 - 0.5 + 10, 0 - 1.0 + 10)
    assert second.answer == "bb"
    assert second.parts == {
        "right": 0.0, "parts": 2.0, "parts/letters": 1.0, "parts/digits": 2.0, "scaled": 10.0,
    }  # fmt: skip


def test_a_row_is_scored_by_the_functions_of_its_source(rewards: str) -> None:
    settings = config(rewards, right={"sources": ["sums"]}, parts={}, compute_score={})
    settings.functions["compute_score"]["sources"] = ["code", "proofs"]

    (sums,) = asked(settings, ["a"], {"data_source": "sums"})
    assert sums.result == 2.0
    assert isnan(sums.parts["compute_score"])
    (code,) = asked(settings, ["abc"], {"data_source": "code"})
    assert code.result == 11.0
    assert isnan(code.parts["right"])
    (rest,) = asked(settings, ["abc"], {})
    assert rest.result == 3.0


def test_a_group_reward_and_one_of_a_completion_go_together(rewards: str) -> None:
    row = {"verdict": ["b", "a"]}
    found = asked(config(rewards, ranked={}, judged={"weight": 10}), ["b", "c"], row)
    assert [one.result for one in found] == [0 + 10.0, 1 + 0.0]


def test_a_group_may_have_nothing_to_score(rewards: str) -> None:
    """All of its episodes may have rewards of their own."""
    scoring = make_scoring(config(rewards, ranked={}, right={}))
    scoring.start()
    try:
        found = [asyncio.run(scoring.score_group(texts, "a", {})) for texts in ([], ["a"])]
        assert [len(scored) for scored in found] == [0, 1]
    finally:
        scoring.close()


def test_a_function_that_says_none_leaves_the_row_to_others(rewards: str) -> None:
    found = asked(config(rewards, mine={}, right={"weight": 3}), ["a", "b"], {})
    assert [one.result for one in found] == [3.0, 1.0]
    assert isnan(found[0].parts["mine"])
    (alone,) = asked(config(rewards, mine={}), ["a"], {})
    assert isinstance(alone.result, Invalid)
    assert alone.result.reason == "mine: returned None, and no other function scores it"


def test_one_without_a_number_makes_the_sum_invalid(rewards: str) -> None:
    (one,) = check_rewards(config(rewards, right={}, raises={}), [("a", "a", {})])
    assert one.result == Invalid("raises: ValueError: no luck")
    assert 'raise ValueError("no luck")' in one.detail
    (one,) = check_rewards(config(rewards, huge={"weight": 2}), [("a", "a", {})])
    assert one.result == Invalid("the sum 6e+38 is beyond float32")


def test_too_many_of_them_stop_the_run(rewards: str) -> None:
    with pytest.raises(RewardError, match=r"5 of 5 calls of reward.functions") as error:
        asked(config(rewards, right={}, raises={}), ["a"] * 6, {})
    assert "5 x raises: ValueError: no luck" in str(error.value)


def test_each_function_gives_the_same_parts_each_time(rewards: str) -> None:
    with pytest.raises(RewardError, match=r"(?s)x and not letters.*other_parts.target="):
        asked(config(rewards, right={}, other_parts={}), ["a", "b"], {})


@pytest.mark.parametrize(
    ("functions", "what"),
    [
        ({"a": {}}, r"reward\.functions\.a names no function\.\n  try:  reward\.functions\.a\.tar"),
        ({"a": "x.py:f"}, r"reward\.functions\.a names no function"),
        ({"a b": {"target": "x:f"}}, "a function 'a b', which cannot name a metric"),
        (
            {"a": {"target": "x:f", "wieght": 2}},
            r"unknown option reward\.functions\.a\.wieght\.\n  did you mean:  reward\.functions\.a"
            r"\.weight",
        ),
        (
            {"a": {"target": "x:f", "weight": "much"}},
            r"a\.weight takes a finite number, got 'much'",
        ),
        ({"a": {"target": "x:f", "args": [1]}}, r"a\.args takes a mapping"),
        ({"a": {"target": "x:f", "sources": "sums"}}, r"a\.sources takes a list \[\.\.\.\] of te"),
    ],
)
def test_a_wrong_entry_is_one_sentence(functions: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        make_scoring(RewardConfig(functions=functions))


def test_one_target_and_several_are_too_much() -> None:
    with pytest.raises(ConfigError, match=r"reward\.target=x:f and reward\.functions are both set"):
        make_scoring(RewardConfig(target="x:f", functions={"a": {"target": "x:f"}}))


def test_the_key_of_a_function_that_cannot_be_used_is_named(rewards: str) -> None:
    for name, more, what in (
        ("scaled", {}, "requires scale, which nothing passes"),
        ("scaled", {"args": {"scale": 1, "bias": 2}}, "do not fit the reward"),
        ("gone", {}, "has no 'gone'"),
    ):
        settings = config(rewards, right={}, **{name: more})
        with pytest.raises(CouplerError, match=rf"(?s)^reward\.functions\.{name}\.target=.*{what}"):
            check_rewards(settings, [])


def test_a_source_without_a_reward_is_refused_and_one_without_rows_named(rewards: str) -> None:
    settings = config(rewards, right={"sources": ["sums", "smus"]}, parts={"sources": ["code"]})
    with pytest.raises(ConfigError, match=r"^row 4 of data has data_source=prose, which no func"):
        check_sources(settings, {"sums": "row 0 of data", "prose": "row 4 of data"})
    with pytest.raises(ConfigError, match="has no data_source, which no function"):
        check_sources(settings, {"": "row 0 of data"})
    absent = check_sources(settings, {"sums": "row 0 of data", "code": "row 1 of data"})
    assert absent == ["reward.functions.right.sources=smus"]
    assert check_sources(RewardConfig(target="x:f"), {"": "row 0 of data"}) == []
