"""Rows and verifiers of reasoning-gym, in a worker process as in a run."""

from __future__ import annotations

import json

import pytest

from coupler.config.schema import DataConfig
from coupler.data import Row, fingerprint, load_rows
from coupler.data.reasoning_gym import literal
from coupler.errors import DataError
from coupler.rewards import Graded, check_reward
from coupler.rewards.reasoning_gym import Exact, LastNumber, Score

SOURCE = "coupler.data.reasoning_gym:rows"


def rows(task: str, size: int = 3, seed: int = 1, **config: object) -> list[Row]:
    return load_rows(DataConfig(source=SOURCE, args={"task": task, "size": size, "seed": seed, **config}))


def test_rows_follow_the_seed_and_the_task_config() -> None:
    few = {"min_terms": 2, "max_terms": 2}
    assert fingerprint(rows("chain_sum", **few)) == fingerprint(rows("chain_sum", **few))
    assert fingerprint(rows("chain_sum", **few)) != fingerprint(rows("chain_sum", seed=2, **few))
    assert all(str(row.prompt).count("+") + str(row.prompt).count("-") <= 2 for row in rows("chain_sum", **few))


def test_the_verifier_in_another_process_knows_the_entry() -> None:
    """word_ladder generates other entries in each process, knights_knaves holds NumPy strings, rearc tuples."""
    found = [row for task in ("chain_sum", "word_ladder", "knights_knaves", "rearc") for row in rows(task, size=2)]
    plain = [(row, json.loads(json.dumps(row.extra))) for row in found]
    samples = [(text, "", extra) for row, extra in plain for text in (row.answer, "no idea")]
    scored = check_reward("coupler.rewards.reasoning_gym:Exact", samples, 60.0)
    assert [s.result for s in scored] == [1.0, 0.0] * len(found)


def test_partial_credit_is_only_in_score() -> None:
    (row,) = rows("chain_sum", size=1)
    score, exact = Score(), Exact()
    sentence = f"it could be {row.answer}"
    assert 0 < float(score(sentence, row.extra)) < 1
    assert exact(sentence, row.extra) == Graded(0.0, sentence)
    assert exact(f"  {row.answer}\n", row.extra) == Graded(1.0, row.answer)
    assert exact(f"<answer>0.5</answer> no, <answer>\n{row.answer} </answer>.", row.extra) == Graded(1.0, row.answer)


def test_the_last_number_counts_however_it_is_worded() -> None:
    (row,) = rows("chain_sum", size=1)
    score, wrong = LastNumber(), int(row.answer) + 1
    assert score(f"{wrong}? No, the sum is {row.answer}.", row.extra) == Graded(1.0, row.answer)
    assert score(f"{row.answer}? No, the sum is {wrong}.", row.extra) == Graded(0.0, str(wrong))
    assert score("I cannot add.", row.extra) == Graded(0.0, "")


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


@pytest.mark.parametrize("value", [object(), float("nan"), complex])
def test_an_entry_that_cannot_be_written_down_is_refused(value: object) -> None:
    with pytest.raises(DataError, match="entry 3 of the reasoning-gym task codeio cannot be written down"):
        literal({"question": "x", "metadata": value}, "codeio", 3)
