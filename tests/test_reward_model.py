"""A sequence classifier scores episodes: its numbers, its batches, and whole runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from job_run import metrics, run
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from coupler.testing.models import write_classifier

EVALUATED = ("eval.at_start=true", "eval.every_steps=3", "eval.data.max_prompt_tokens=64")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("classifier"), seed=5)


def by_transformers(folder: Path, prompt: str, completion: str) -> float:
    """The score of one conversation, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).float().eval()
    conversation = [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": completion},
    ]
    ids = tokenizer.apply_chat_template(conversation, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        return float(model(**ids).logits[0, 0])


def samples(run_dir: Path, step: int) -> list[dict[str, float | str]]:
    """What an evaluation scored."""
    return [json.loads(line) for line in (run_dir / f"eval_{step}.jsonl").read_text().splitlines()]


def test_the_score_is_that_of_transformers(model: Path, classifier: Path, tmp_path: Path) -> None:
    asked = (f"reward_model.model.path={classifier}", "reward.target=")
    folder = run(
        "train", model, tmp_path / "run", "algorithm=grpo", *asked, *EVALUATED,
        f"eval.data.source={tmp_path / 'rows.jsonl'}",
    )  # fmt: skip

    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for sample in samples(folder, 0):
        want = by_transformers(
            classifier, rows[int(sample["row"])]["prompt"], str(sample["completion"])
        )
        assert sample["score"] == pytest.approx(want, abs=1e-5)
        assert sample["reward"] == sample["score"]
    last = metrics(folder)[-1]
    assert last["reward_model/invalid_rate"] == 0.0 and last["time/reward_model"] > 0
