"""The stream that a class of the user decides, and the curriculum of core's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coupler.data import Prompt, Row, prompt_stream
from coupler.data.curriculum import ByReward
from coupler.data.options import DataConfig
from coupler.data.sampling import SampledStream
from coupler.errors import DataError

CLASS = """
class Told:
    def __init__(self, rows, seed, start=0):
        self.rows, self.seed, self.told, self.at = rows, seed, [], start
    def next(self):
        self.at += 1
        return self.at % len(self.rows)
    def update(self, row, rewards):
        self.told.append([row, rewards])
    def state(self):
        return {"told": self.told, "at": self.at}
    def restore(self, state):
        self.told, self.at = state["told"], state["at"]
"""
PROMPTS = [Prompt(Row(f"p{i}", "", 10 + i, {"n": i}), (1, i)) for i in range(4)]


@pytest.fixture
def stream(tmp_path: Path) -> SampledStream:
    (tmp_path / "told.py").write_text(CLASS)
    return made(tmp_path)


def made(folder: Path, **args: Any) -> SampledStream:
    config = DataConfig(sampler=f"{folder}/told.py:Told", sampler_args=args)
    found = prompt_stream(PROMPTS, [prompt.row for prompt in PROMPTS], config, 7)
    assert isinstance(found, SampledStream)
    return found


def test_the_class_gets_rows_as_rewards_see_them(stream: SampledStream, tmp_path: Path) -> None:
    assert stream.sampler.rows[1] == {"index": 11, "n": 1, "prompt": "p1", "answer": ""}
    assert stream.sampler.seed == 7
    assert made(tmp_path, start=2).next() == 3


def test_updates_wait_for_the_groups_before_theirs(stream: SampledStream) -> None:
    drawn = [stream.next() for _ in range(4)]
    assert drawn == [1, 2, 3, 0]
    stream.finished(2, 3, [1.0], unfinished={0, 1, 3})
    stream.finished(1, 2, [0.5], unfinished={0, 3})
    assert stream.sampler.told == []
    stream.finished(0, 1, [], unfinished={3})
    assert stream.sampler.told == [[1, []], [2, [0.5]], [3, [1.0]]]
    stream.finished(3, 0, [0.0], unfinished=set())
    assert stream.sampler.told[-1] == [0, [0.0]] and not stream.waiting


def test_a_restored_stream_goes_on_exactly(stream: SampledStream, tmp_path: Path) -> None:
    for _ in range(3):
        stream.next()
    stream.finished(2, 3, [1.0], unfinished={0, 1})
    state = json.loads(json.dumps(stream.state()))
    resumed = made(tmp_path)
    resumed.restore(state)

    for each in (stream, resumed):
        each.finished(1, 2, [0.25], unfinished={0})
        each.finished(0, 1, [0.75], unfinished=set())
        assert each.sampler.told == [[1, [0.75]], [2, [0.25]], [3, [1.0]]]
    assert stream.next() == resumed.next()
    assert stream.state() == resumed.state()


def test_a_state_is_a_copy(stream: SampledStream) -> None:
    """A checkpoint is written while the run goes on."""
    state = stream.state()
    stream.finished(0, 1, [1.0], unfinished=set())
    assert state["sampler"]["told"] == []


def rows(num: int) -> list[dict[str, Any]]:
    return [{"index": i} for i in range(num)]


def test_rows_outside_the_bounds_rest() -> None:
    sampler = ByReward(rows(4), seed=3, low=0.2, high=0.8, rest=2)
    rewards = {0: [1.0, 1.0], 1: [0.0, 0.0], 2: [0.0, 1.0], 3: [0.5, 0.5]}
    epochs: list[list[int]] = []
    for _ in range(14):
        row = sampler.next()
        while len(epochs) <= sampler.order.epoch:
            epochs.append([])
        epochs[sampler.order.epoch].append(row)
        sampler.update(row, rewards[row])
    assert [sorted(epoch) for epoch in epochs[:5]] == [
        [0, 1, 2, 3], [2, 3], [2, 3], [0, 1, 2, 3], [2, 3],
    ]  # fmt: skip


def test_a_data_set_that_rests_as_a_whole_still_gives_rows() -> None:
    sampler = ByReward(rows(3), seed=0)
    for _ in range(20):
        sampler.update(sampler.next(), [1.0])


def test_a_curriculum_goes_on_exactly() -> None:
    def play(sampler: ByReward, num: int) -> list[int]:
        found = []
        for _ in range(num):
            found.append(sampler.next())
            sampler.update(found[-1], [float(found[-1] % 3 == 0)] * 2)
        return found

    for done in range(12):
        whole = ByReward(rows(5), seed=1)
        play(whole, done)
        state = json.loads(json.dumps(whole.state()))
        resumed = ByReward(rows(5), seed=1)
        resumed.restore(state)
        assert play(resumed, 20) == play(whole, 20)


def test_bounds_that_hold_nothing_are_refused() -> None:
    with pytest.raises(DataError, match=r"low=0.5 must be below high=0.5"):
        ByReward(rows(2), seed=0, low=0.5, high=0.5)
