"""What evaluation reports: of every source of rows, and of the answer that most samples
give.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from coupler.cli import main
from coupler.data import Prompt, Row
from coupler.interfaces import Completion, Request
from coupler.loop.evaluator import Evaluator
from coupler.loop.sampler import ScoredCompletion
from coupler.metrics import values
from coupler.testing.models import write_tokenizer, write_toy

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

    async def sample(self, prompt: Prompt, *_: Any, **__: Any) -> list[ScoredCompletion]:
        done = Completion((1, 2), (0.0, 0.0), (0, 0), "stop")
        found = SAMPLES[prompt.row.index]
        return [
            ScoredCompletion(prompt, done, reward, answer if self.reads else None)
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


def test_each_source_has_numbers_of_its_own() -> None:
    found = evaluated("sums", "sums", "words", "")
    assert found["eval/sums/reward"] == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert found["eval/words/majority_of_3"] == 0
    assert found["eval/other/reward"] == 0
    assert found["eval/reward"] == pytest.approx((2 / 3 + 1 / 3) / 4)


ROWS = "".join(json.dumps({"prompt": f"{i} + 2", "answer": str(i)}) + "\n" for i in range(6))
REWARD = "def score(completion):\n    return len(set(completion)) / (1 + len(completion))\n"


def arguments(folder: Path, *more: str) -> list[str]:
    """Return the command line of a run on the toy backends that evaluates."""
    write_tokenizer(write_toy(folder / "model"))
    (folder / "rows.jsonl").write_text(ROWS)
    (folder / "reward.py").write_text(REWARD)
    return [
        "engine=toy", "engine.lr=1.0", "rollout=toy", "algorithm=toy", "steps=3",
        f"model.path={folder / 'model'}", f"run_dir={folder / 'run'}",
        f"data.source={folder / 'rows.jsonl'}", "data.max_prompt_tokens=64",
        f"reward.target={folder / 'reward.py'}:score", "prompts_per_step=2",
        "samples_per_prompt=2", "sampling.max_tokens=12", "deterministic=true", "strict=true",
        f"eval.data.source={folder / 'rows.jsonl'}", "eval.data.max_prompt_tokens=64",
        "eval.every_steps=1", "eval.at_start=true", "eval.temperature=1", "trackers=[jsonl]", *more,
    ]  # fmt: skip


def evaluations(folder: Path, *more: str) -> list[dict[str, float]]:
    """Train, and return the metrics of evaluation of every step."""
    folder.mkdir(exist_ok=True)
    assert main(["train", *arguments(folder, *more)]) == 0
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [{k: v for k, v in line.items() if k.startswith("eval/")} for line in found]


def test_a_rollout_of_its_own_evaluates_with_the_weights_of_the_step(tmp_path: Path) -> None:
    shared = evaluations(tmp_path / "shared")
    apart = evaluations(tmp_path / "apart", "eval.rollout=toy")

    assert len({step["eval/reward"] for step in shared}) > 1, "training changes the answers"
    for step in apart:
        assert step.pop("eval/sync/probe") < 1e-6
    assert apart[0].pop("eval/sync/probe_permuted") > 1e-2
    assert apart == shared


def test_a_resumed_run_brings_its_own_rollout_the_weights_again(tmp_path: Path) -> None:
    whole = evaluations(tmp_path / "whole", "eval.rollout=toy")
    evaluations(tmp_path / "cut", "eval.rollout=toy", "steps=2")
    again = evaluations(tmp_path / "cut", "eval.rollout=toy", "strict=false")
    assert "eval/sync/probe_permuted" in again[-1], "the first push of a process is proved"
    assert again[-1]["eval/reward"] == whole[-1]["eval/reward"]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("eval.rollout=toy", "offload=true"), "offload=true and eval.rollout=toy"),
        (("eval.rollout=toy", "eval.rollout.replicas=2"), "set executor=ray, or eval.rollout.repl"),
        (("eval.rollout=none",), "eval.rollout=none: no rollout named 'none' is installed"),
        (("eval.rollout.replicas=2",), "try:  eval.rollout=NAME"),
    ],
)
def test_what_a_rollout_of_evaluations_cannot_do_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], sentence: str
) -> None:
    assert main(["train", *arguments(tmp_path, *more)]) == 2
    assert sentence in capsys.readouterr().err


def test_an_evaluation_alone_samples_with_rollout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(tmp_path, "eval.rollout=toy")
    assert main(["eval", *given]) == 2
    assert "eval.rollout=toy is of coupler train: here rollout samples" in capsys.readouterr().err
