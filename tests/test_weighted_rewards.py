"""Train with several rewards, chosen by the source of a row, and read their parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from job_run import arguments, metrics, write_inputs

from coupler.cli import main

REWARDS = """
def brief(completion, limit):
    return {"reward": float(len(completion) < limit), "characters": len(completion)}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "odd"
    return {"score": 4.0 if ground_truth in solution_str else 3.0, "acc": 1.0}
"""


def inputs(folder: Path) -> list[str]:
    """Write rows of two sources, and return the command line of a run on them."""
    write_inputs(folder)
    rows = [
        {"prompt": f"what is {i} ?", "answer": str(i), "data_source": ("even", "odd")[i % 2]}
        for i in range(6)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    return [
        "reward.target=''",
        f"reward.functions.brief.target={folder / 'rewards.py'}:brief",
        "reward.functions.brief.args.limit=1000",
        "reward.functions.brief.weight=0.5",
        f"reward.functions.theirs.target={folder / 'rewards.py'}:compute_score",
        "reward.functions.theirs.weight=2",
        "reward.functions.theirs.sources=[odd]",
    ]


def test_two_rewards_by_source_are_added_and_their_parts_tracked(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several = inputs(tmp_path)
    given = arguments("train", model, tmp_path, tmp_path / "run")
    held_out = ["eval.every_steps=3", f"eval.data.source={tmp_path / 'rows.jsonl'}"]
    more = ["eval.data.max_prompt_tokens=64", "prompts_per_step=6", "strict=true"]
    assert main([*given, *several, *held_out, *more, "samples.every_steps=1"]) == 0

    log = metrics(tmp_path / "run")
    assert "theirs.target=" in capsys.readouterr().out
    for step in log[1:]:
        theirs = step["reward_parts/theirs"]
        assert 3 <= theirs <= 4, "the mean is over rows of its source alone"
        assert step["reward_parts/theirs/acc"] == 1.0
        assert step["reward_parts/brief"] == 1.0
        assert step["reward_parts/brief/characters"] > 0
        assert step["sampled/reward"] == pytest.approx(0.5 + 2 * theirs / 2)
    assert log[-1]["eval/reward_parts/brief"] == 1.0
    assert log[-1]["eval/odd/reward"] >= 6.5
    assert log[-1]["eval/even/reward"] == 0.5

    lines = (tmp_path / "run" / "samples" / "step_1.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        parts = line["reward_parts"]
        assert parts.keys() == {"brief", "theirs"}
        assert line["reward"] == 0.5 * parts["brief"] + 2 * parts["theirs"]
        assert (parts["theirs"] > 0) == (line["data_source"] == "odd")


def test_a_source_without_a_reward_ends_the_run_before_it_starts(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several = inputs(tmp_path)
    given = arguments("train", model, tmp_path, tmp_path / "run")
    assert main([*given, *several, "reward.functions.brief.sources=[evne]"]) == 2
    said = capsys.readouterr().err
    assert "row 0 (from 0) of data has data_source=even, which no function of reward.funct" in said


def test_a_run_that_learns_nothing_says_so_once(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    (tmp_path / "reward.py").write_text("def score(completion): return 0.25\n")
    given = arguments("train", model, tmp_path, tmp_path / "run")
    more = ["steps=7", "engine.lr=1e-9", "sampling.max_tokens=64", 'sampling.stop=[".",e,a,t]']
    assert main([*given, *more]) == 0

    said = capsys.readouterr().err
    assert said.count("the run learns nothing: in the last 5 steps") == 1
    assert "every completion got the same reward, 0.25." in said
    assert said.count("--- sample of step 5, reward 0.25") == 2, "one of each prompt"
