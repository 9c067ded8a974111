"""Reward functions of TRL, of verl and async ones, in real processes as users wrote
them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from coupler.errors import ConfigError, CouplerError
from coupler.metrics import values
from coupler.rewards import Invalid, RewardPool, Scored

REWARDS = """
import asyncio, os, time

# as in TRL's documents
def chat_format(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if text.startswith("<think>") else 0.0 for text in contents]

def lists(prompts, completions, ground_truth, **kwargs):
    assert len(prompts) == len(completions) == len(ground_truth) == len(kwargs["index"])
    assert "completion_ids" not in kwargs and "prompt" not in kwargs
    return [float(a == b) for a, b in zip(completions, ground_truth)]

def named(prompts, completions, level=None): return [float(one or 0) for one in level]
def size(prompts, completions): return [float(len(prompts))] * len(completions)
def others(prompts, completions, **kwargs): return [None, *[1.0] * (len(completions) - 1)]
def fewer(completions, **kwargs): return [1.0]
def ids(prompts, completions, completion_ids): return [0.0] * len(completions)
def one_bad(prompts, completions, **kwargs):
    assert "bad" not in completions, "a bad one"
    return [float(len(prompts))] * len(completions)
def one_hangs(prompts, completions, **kwargs):
    if "hang" in completions: time.sleep(1000)
    return [2.0] * len(completions)
async def awaited(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [3.0] * len(completions)

# as in verl's documents
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source == "sums": return float(solution_str == ground_truth)
    if data_source == "lists": return float(ground_truth == ["1", "2"])
    if extra_info: return extra_info["level"]
    return {"score": 0.5, "acc": True, "pred": solution_str, "note": "kept out"}
def more(data_source, solution_str, ground_truth, extra_info=None, scale=1.0, **kwargs):
    return scale
def lost(data_source, solution_str, ground_truth, tokenizer): return 0

most = now = 0
async def later(completion):
    global most, now
    if completion == "most": return most
    if completion == "raise": raise ValueError("no luck")
    if completion == "hang": await asyncio.sleep(1000)
    if completion == "block": time.sleep(1000)
    now += 1; most = max(most, now)
    await asyncio.sleep(0.2)
    now -= 1
    return float(len(completion))
class Client:
    def __init__(self, url="none", model=""): self.url = url
    async def __call__(self, completion): return {"http://x": 4.0}[self.url]
"""


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    (tmp_path / "theirs.py").write_text(REWARDS)
    return str(tmp_path / "theirs.py")


Group = tuple[list[str], str, dict[str, Any]]


def scored(target: str, *groups: Group, timeout_s: float = 5.0, **more: Any) -> list[list[Scored]]:
    """Ask for all groups at once, and return what each completion got."""
    pool = RewardPool(target, 1, timeout_s, 1.0, **more)

    async def ask() -> list[list[Scored]]:
        if pool.takes_group:
            return await asyncio.gather(*(pool.score_group(*group) for group in groups))
        calls = (
            asyncio.gather(*(pool.score(text, answer, row) for text in texts))
            for texts, answer, row in groups
        )
        return await asyncio.gather(*calls)

    try:
        pool.start()
        return asyncio.run(ask())
    finally:
        pool.close()


def results(found: list[list[Scored]]) -> list[list[float | Invalid]]:
    return [[one.result for one in group] for group in found]


ROW = {"prompt": "p", "index": 3, "ground_truth": "7"}
CHAT = {"prompt": [{"role": "user", "content": "q"}]}


def test_a_function_of_trl_gets_lists_and_chats(rewards: str) -> None:
    found = scored(f"{rewards}:chat_format", (["<think>", "no"], "", CHAT))
    assert results(found) == [[1.0, 0.0]]
    assert results(scored(f"{rewards}:lists", (["7", "8"], "", ROW))) == [[1.0, 0.0]]
    rows = [(["a"], "", {"prompt": "p", "level": 2}), (["b", "c"], "", {"prompt": "q"})]
    assert results(scored(f"{rewards}:named", *rows)) == [[2.0], [0.0, 0.0]]


def test_prompts_that_wait_are_scored_together(rewards: str) -> None:
    groups = [(["x"] * 4, "", {"prompt": str(i)}) for i in range(9)]
    found = results(scored(f"{rewards}:size", *groups))
    assert max(one for group in found for one in group if isinstance(one, float)) > 4
    assert all(len(set(group)) == 1 for group in found)


def test_one_bad_prompt_costs_no_other(rewards: str) -> None:
    groups = [([text, "y"], "", {"prompt": text}) for text in ("a", "b", "bad", "c")]
    found = results(scored(f"{rewards}:one_bad", *groups))
    assert found[2] == [Invalid("AssertionError: a bad one")] * 2
    assert [isinstance(group[0], float) for group in found] == [True, True, False, True]

    groups = [([text], "", {"prompt": text}) for text in ("a", "b", "hang", "c", "d")]
    found = results(scored(f"{rewards}:one_hangs", *groups, timeout_s=1.0))
    assert found == [[2.0], [2.0], [Invalid("took longer than 1 s")], [2.0], [2.0]]


def test_trl_functions_may_be_async_and_leave_rows_out(rewards: str) -> None:
    assert results(scored(f"{rewards}:awaited", (["a", "b"], "", ROW))) == [[3.0, 3.0]]
    (group,) = results(scored(f"{rewards}:others", (["a", "b"], "", ROW)))
    assert group == [Invalid("returned None, and no other function scores it"), 1.0]
    (group,) = results(scored(f"{rewards}:fewer", (["a", "b"], "", ROW)))
    assert group == [Invalid("returned 1 rewards for 2 completions")] * 2


def test_a_function_of_verl_gets_what_verl_gives_it(rewards: str) -> None:
    def one(row: dict[str, Any], text: str = "7") -> Scored:
        return scored(f"{rewards}:compute_score", ([text], "7", row))[0][0]

    assert one({"data_source": "sums"}).result == 1.0
    assert one({"data_source": "lists", "reward_model": {"ground_truth": ["1", "2"]}}).result == 1.0
    assert one({"extra_info": {"level": 3}}).result == 3.0
    graded = one({})
    assert (graded.result, graded.answer, graded.parts) == (0.5, "7", {"acc": 1.0})


def test_arguments_of_the_configuration_reach_it(rewards: str) -> None:
    assert results(scored(f"{rewards}:more", (["a"], "", {}), args={"scale": 2.5})) == [[2.5]]
    found = scored(f"{rewards}:Client", (["a"], "", {}), args={"url": "http://x"})
    assert results(found) == [[4.0]]


def test_the_log_says_whose_signature_it_is(
    rewards: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("lists", "compute_score", "later"):
        scored(f"{rewards}:{name}", (["7"], "", ROW))
    said = [line for line in capsys.readouterr().out.splitlines() if "reward.target=" in line]
    assert len(said) == 2
    assert "has the signature of TRL, and is called so: with prompts, completions" in said[0]
    assert "has the signature of verl, and is called so: with data_source" in said[1]


@pytest.mark.parametrize(
    ("name", "args", "what"),
    [
        ("ids", {}, "requires completion_ids, which only TRL's trainer has"),
        ("lost", {}, "requires tokenizer, which nothing passes"),
        ("more", {"ground_truth": 1}, "have ground_truth, which every call passes"),
        ("named", {"levle": 1}, r"the args {levle} do not fit the reward .*unexpected keyword"),
        ("Client", {"uri": 1}, r"the args {uri} do not fit the reward .*unexpected keyword"),
    ],
)
def test_what_cannot_be_called_is_one_sentence(
    rewards: str, name: str, args: dict[str, Any], what: str
) -> None:
    with pytest.raises(CouplerError, match=what):
        RewardPool(f"{rewards}:{name}", 1, 5.0, 0.01, args=args).start()


def test_a_column_that_no_row_has_is_one_sentence(rewards: str) -> None:
    pool = RewardPool(f"{rewards}:lists", 1, 5.0, 0.01)
    try:
        pool.start()
        pool.check_columns({"prompt", "ground_truth"})
        with pytest.raises(ConfigError, match="takes the column ground_truth, which no row has"):
            pool.check_columns({"prompt", "answer"})
    finally:
        pool.close()


def test_async_calls_run_side_by_side_up_to_a_limit(rewards: str) -> None:
    pool = RewardPool(f"{rewards}:later", 1, 5.0, 1.0, concurrency=4)

    async def ask() -> list[float | Invalid]:
        texts = ["a", "bb", "raise", "ccc"] * 4
        found = await asyncio.gather(*(pool.score(text, "", {}) for text in texts))
        return [one.result for one in (*found, await pool.score("most", "", {}))]

    try:
        pool.start()
        *found, most = asyncio.run(ask())
    finally:
        pool.close()
    assert found == [1.0, 2.0, Invalid("ValueError: no luck"), 3.0] * 4
    assert most == 3, "of four calls at once one raises before it waits"


def test_an_async_call_that_hangs_costs_itself(rewards: str) -> None:
    pool = RewardPool(f"{rewards}:later", 1, 1.0, 1.0)

    async def ask() -> list[float | Invalid]:
        texts = ["a", "hang", "bb", "block", "ccc"]
        return [one.result for one in await asyncio.gather(*(pool.score(t, "", {}) for t in texts))]

    try:
        pool.start()
        late = Invalid("took longer than 1 s")
        assert asyncio.run(ask()) == [1.0, late, 2.0, late, 3.0]
        assert values(pool.metrics())["reward/timeout_rate"] == pytest.approx(2 / 5)
    finally:
        pool.close()
