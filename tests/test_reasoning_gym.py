"""Rows and verifiers of reasoning-gym, in a worker process as in a run."""

from __future__ import annotations

import json

import pytest

from coupler.config.schema import DataConfig
from coupler.data import Row, fingerprint, load_rows
from coupler.errors import DataError
from coupler.rewards import Scored, check_reward
from coupler.rewards.reasoning_gym import exact, score

SOURCE = "coupler.data.reasoning_gym:rows"


def rows(task: str, size: int = 3, seed: int = 1, **config: object) -> list[Row]:
    return load_rows(DataConfig(source=SOURCE, args={"task": task, "size": size, "seed": seed, **config}))


def score_there(name: str, pairs: list[tuple[str, Row]]) -> list[Scored]:
    samples = [(text, row.answer, json.loads(json.dumps(row.extra))) for text, row in pairs]
    return check_reward(f"coupler.rewards.reasoning_gym:{name}", samples, 60.0)


def test_rows_follow_the_seed_and_the_task_config() -> None:
    few = {"min_terms": 2, "max_terms": 2}
    assert fingerprint(rows("chain_sum", **few)) == fingerprint(rows("chain_sum", **few))
    assert fingerprint(rows("chain_sum", **few)) != fingerprint(rows("chain_sum", seed=2, **few))
    assert all(str(row.prompt).count("+") + str(row.prompt).count("-") <= 2 for row in rows("chain_sum", **few))


# word_ladder generates other entries per process; knights_knaves holds NumPy strings; arc_1d holds tuples; the answers
# of all are full marks
@pytest.mark.parametrize("task", ["chain_sum", "word_ladder", "knights_knaves", "arc_1d", "rearc"])
def test_the_verifier_in_another_process_knows_the_entry(task: str) -> None:
    found = rows(task)
    assert [s.result for s in score_there("exact", [(row.answer, row) for row in found])] == [1.0] * 3
    assert [s.result for s in score_there("exact", [("no idea", row) for row in found])] == [0.0] * 3


def test_partial_credit_is_only_in_score() -> None:
    (row,) = rows("chain_sum", size=1)
    sentence = f"it could be {row.answer}"
    assert 0 < score(sentence, row.extra) < 1
    assert exact(sentence, row.extra) == 0
    assert exact(f"  {row.answer}\n", row.extra) == 1
    assert exact(f"<answer>0.5</answer> no, <answer>\n{row.answer} </answer>.", row.extra) == 1


@pytest.mark.parametrize(
    ("args", "what"),
    [
        ({"task": "chain_sun", "size": 1, "seed": 0}, "no task 'chain_sun' - did you mean 'chain_sum'"),
        ({"task": "chain_sum", "size": 1, "seed": 0, "terms": 3}, "(?s)chain_sum refuses data.args.*terms"),
        ({"task": "chain_sum", "size": 1, "seed": 0, "min_terms": -1}, "chain_sum refuses data.args"),
        ({"task": "chain_sum"}, "data.args does not fit"),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, object], what: str) -> None:
    with pytest.raises(DataError, match=what):
        load_rows(DataConfig(source=SOURCE, args=args))


def test_an_entry_that_cannot_be_written_down_is_refused() -> None:
    with pytest.raises(DataError, match="codeio cannot be written down"):
        rows("codeio")
