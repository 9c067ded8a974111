"""What evaluation reports: of every source of rows, and of the answer that most samples
give.
"""

from __future__ import annotations

import asyncio
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from coupler.conversation.packing import Sample
from coupler.conversation.tree import Row as OnePath
from coupler.data import Prompt, Row
from coupler.interfaces import Completion, Request
from coupler.jobs.evaluator import Evaluator, best_of, interval, resampled
from coupler.metrics import values

SAMPLES = {  # row: (reward, answer) of its valid samples, of three
    0: [(0.0, "4"), (1.0, "5"), (1.0, "5")],
    1: [(1.0, "1"), (0.0, "2"), (0.0, "3")],
    2: [(0.0, "7"), (0.0, "7")],
    3: [],
}


class Scripted:
    """Gives the samples of :data:`SAMPLES`, with what the reward read or without."""

    def __init__(self, reads: bool) -> None:
        self.reads = reads

    async def sample(self, prompt: Prompt, *_: Any, **__: Any) -> list[Sample]:
        done = Completion((1, 2), (0.0, 0.0), (0, 0), "stop")
        rows = (OnePath.of_one_turn(prompt.ids, done),)
        found = SAMPLES[prompt.row.index]
        return [
            Sample(prompt, rows, reward, "", "stop", answer if self.reads else None)
            for reward, answer in found
        ]


def evaluated(*sources: str, reads: bool = True) -> dict[str, float]:
    prompts = [
        Prompt(Row("p", "a", i, {"data_source": source}), (1,)) for i, source in enumerate(sources)
    ]
    scorer: Any = Scripted(reads)
    return values(asyncio.run(Evaluator(scorer, prompts, 3, Request((), 8), 0).run())[0])


def test_the_majority_counts_its_own_reward_and_a_tie_the_first() -> None:
    found = evaluated(*["one"] * 4)
    assert found["eval/reward"] == pytest.approx((2 / 3 + 1 / 3 + 0 + 0) / 4)
    assert found["eval/best_of_3"] == pytest.approx(2 / 4)
    assert found["eval/majority_of_3"] == pytest.approx(2 / 4)
    assert "eval/majority_of_3" not in evaluated(*["one"] * 4, reads=False)
    assert all(name.count("/") == 1 for name in found), "one source has no names of its own"


def test_the_best_of_fewer_samples_is_that_of_every_subset() -> None:
    """It equals the mean over all subsets, and pass@k for rewards 0 and 1."""
    rewards = np.array([[0.1, 0.9, 0.4, 0.4, 0.0], [1.0, 0.0, 0.0, 1.0, 0.0]])
    for k in range(1, 6):
        every = [[max(subset) for subset in combinations(row, k)] for row in rewards]
        assert best_of(rewards, k).tolist() == pytest.approx(np.mean(every, axis=1).tolist())
    # 2 of 5 samples are right: 1 - C(3, k) / C(5, k).
    assert best_of(rewards, 2)[1] == pytest.approx(1 - 3 / 10)

    found = evaluated(*["one"] * 4)
    assert found["eval/best_of_2"] == pytest.approx((1.0 + 2 / 3 + 0 + 0) / 4)
    assert 0 < found["eval/majority_of_2"] < 0.5


def test_bounds_hold_the_mean_of_the_population() -> None:
    """In 95 of 100 evaluations of 200 prompts, but for chance."""
    draw = np.random.default_rng(3)
    inside, draws = 0, resampled(200)
    for _ in range(200):
        low, high = interval((draw.random(200) < 0.3).astype(float), draws)
        inside += low <= 0.3 <= high
    assert 0.90 < inside / 200 < 0.99
    assert interval(np.ones(5), resampled(5)) == (1.0, 1.0)


def test_each_source_has_numbers_of_its_own() -> None:
    found = evaluated("sums", "sums", "words", "")
    assert found["eval/sums/reward"] == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert found["eval/words/majority_of_3"] == 0
    assert found["eval/other/reward"] == 0
    assert found["eval/reward"] == pytest.approx((2 / 3 + 1 / 3) / 4)
