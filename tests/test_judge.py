"""A language model judges episodes: with weights of its own, on rollouts of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job_run import metrics, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from coupler.cli import main
from coupler.testing.models import EOS, VOCAB, read_tensors, rewrite, write_qwen2
from coupler.testing.models import write_tokenizer, write_toy

QUESTION = "Rate this answer to {prompt} with {answer}: {completion} {"
HELD_OUT = ("eval.at_start=true", "eval.data.max_prompt_tokens=64")
BY_LENGTH = "def score(verdict, score=None):\n    return len(verdict)\n"


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    return write_qwen2(folder, tied=True, seed=9, max_position_embeddings=512)


def samples(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """What an evaluation scored."""
    return [json.loads(line) for line in (run_dir / f"eval_{step}.jsonl").read_text().splitlines()]


def said_by_transformers(folder: Path, question: str, max_tokens: int) -> str:
    """The greedy answer of the model in ``folder``, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    with torch.no_grad():
        for _ in range(max_tokens):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
            if int(ids[0, -1]) in (EOS, 0):
                break
    start = len(tokenizer.encode(text, add_special_tokens=False))
    return tokenizer.decode(ids[0, start:], skip_special_tokens=True)


def test_the_verdict_is_of_the_judges_own_weights(
    model: Path, judge: Path, tmp_path: Path
) -> None:
    (tmp_path / "question.txt").write_text(QUESTION)
    (tmp_path / "by_length.py").write_text(BY_LENGTH.replace("verdict,", "completion, verdict,"))
    folder = run(
        "train", model, tmp_path / "run", "algorithm=grpo", f"judge.model.path={judge}",
        f"judge.prompt={tmp_path / 'question.txt'}", "judge.rollout.dtype=fp32",
        "judge.max_tokens=6", f"reward.target={tmp_path / 'by_length.py'}:score", *HELD_OUT,
        f"eval.data.source={tmp_path / 'rows.jsonl'}",
    )  # fmt: skip

    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    scored = samples(folder, 0)
    assert len(scored) == len(rows)
    for sample in scored:
        row = rows[sample["row"]]
        question = QUESTION.replace("{prompt}", row["prompt"]).replace("{answer}", row["answer"])
        question = question.replace("{completion}", sample["completion"])
        assert sample["verdict"] == said_by_transformers(judge, question, 6)
        assert sample["reward"] == len(sample["verdict"])
    assert metrics(folder)[-1]["judge/tokens"] > 0
