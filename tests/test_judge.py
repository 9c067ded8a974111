"""A language model judges episodes: with weights of its own, on rollouts of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job_run import metrics, run
from played_environments import SEEN
from transformers import AutoModelForCausalLM, AutoTokenizer

from coupler.cli import main
from coupler.data import Codec
from coupler.interfaces import Model
from coupler.rewards.judge import shown
from coupler.testing.models import (
    EOS,
    VOCAB,
    rewrite,
    write_qwen2,
    write_tokenizer,
    write_toy,
)

QUESTION = "Rate this answer to {prompt} with {answer}: {completion} {"
HELD_OUT = ("eval.at_start=true", "eval.data.max_prompt_tokens=64")
BY_LENGTH = "def score(completion, verdict):\n    return len(verdict)\n"
HIGH = 160  # the toy judge gives a 1 for a completion whose last token is at least this
ROWS = "".join(json.dumps({"prompt": f"{i} + 2 =", "answer": str(i)}) + "\n" for i in range(6))


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
    start = ids.shape[1]

    with torch.no_grad():
        for _ in range(max_tokens):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
            if int(ids[0, -1]) in (EOS, 0):
                break
    return tokenizer.decode(ids[0, start:], skip_special_tokens=True)


def test_the_verdict_is_of_the_judges_own_weights(model: Path, judge: Path, tmp_path: Path) -> None:
    (tmp_path / "question.txt").write_text(QUESTION)
    (tmp_path / "by_length.py").write_text(BY_LENGTH)
    folder = run(
        "train", model, tmp_path / "run", "algorithm=grpo", f"judge.model.path={judge}",
        f"judge.prompt={tmp_path / 'question.txt'}", "judge.rollout.dtype=fp32",
        "judge.max_tokens=6", f"reward.target={tmp_path / 'by_length.py'}:score", *HELD_OUT,
        f"eval.data.source={tmp_path / 'rows.jsonl'}", "strict=true",
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


def write_toy_judge(folder: Path) -> Path:
    """Write a bigram that answers 1 or 0 by the last token that it is shown.

    It has no chat template, so that the question ends with the completion.
    """
    plain = write_toy(folder.with_name("plain"))
    write_tokenizer(plain)
    one, zero = AutoTokenizer.from_pretrained(plain).convert_tokens_to_ids(["1", "0"])
    head = np.zeros((VOCAB, VOCAB), np.float32)
    head[one, HIGH:], head[zero, :HIGH] = 50.0, 50.0
    head[:, [one, zero]] = 0.0
    head[EOS, [one, zero]] = 50.0

    tensors = {
        "embed.weight": np.eye(VOCAB, dtype=np.float32),
        "head.weight": head,
        "head.bias": np.zeros(VOCAB, np.float32),
    }
    rewrite(plain, folder, tensors)
    for path in plain.glob("*.jinja"):
        assert not (folder / path.name).exists(), "the judge has no chat template"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def arguments(folder: Path, *more: str) -> list[str]:
    """Return the command line of a toy run whose reward is a toy judge's number."""
    write_tokenizer(write_toy(folder / "model"))
    write_toy_judge(folder / "judge")
    (folder / "rows.jsonl").write_text(ROWS)
    (folder / "question.txt").write_text("{prompt}{completion}")
    return [
        "engine=toy", "engine.lr=1.0", "rollout=toy", "algorithm=toy", "steps=8",
        f"model.path={folder / 'model'}", f"run_dir={folder / 'run'}",
        f"data.source={folder / 'rows.jsonl'}", "data.max_prompt_tokens=64",
        "prompts_per_step=4", "samples_per_prompt=4", "sampling.max_tokens=1",
        "deterministic=true", "strict=true", "trackers=[jsonl]", "reward.max_invalid_fraction=1",
        f"judge.model.path={folder / 'judge'}", f"judge.prompt={folder / 'question.txt'}",
        "judge.pattern='(\\d)'", "judge.max_tokens=4", *more,
    ]  # fmt: skip


def trained(folder: Path, *more: str) -> list[dict[str, float]]:
    """Train on the toy backends, and return the metrics of every step."""
    folder.mkdir(exist_ok=True)
    assert main(["train", *arguments(folder, *more)]) == 0
    return metrics(folder / "run")


def test_the_number_of_a_verdict_is_the_reward_and_is_learnt(tmp_path: Path) -> None:
    log = trained(tmp_path / "run")
    first, last = log[1]["sampled/reward"], log[-1]["sampled/reward"]
    assert first < 0.75 < 0.9 < last <= 1.0
    assert log[-1]["judge/invalid_rate"] == 0.0


def test_a_resumed_run_is_judged_the_same(tmp_path: Path) -> None:
    sampled = ("judge.temperature=1.0", "checkpoint.every_steps=1")
    whole = trained(tmp_path / "whole", *sampled, "steps=4")
    trained(tmp_path / "cut", *sampled, "steps=2")
    again = trained(tmp_path / "cut", *sampled, "steps=4", "strict=false")
    assert again[-1]["sampled/reward"] == whole[-1]["sampled/reward"]
    assert again[-1]["loss"] == whole[-1]["loss"]


def test_a_function_of_all_completions_gets_the_verdicts_as_a_list(tmp_path: Path) -> None:
    """An algorithm that leaves groups of equal rewards out samples others instead."""
    tmp_path.joinpath("group.py").write_text(
        "def score(completions, verdict, row):\n"
        "    assert row['verdict'] == verdict and len(verdict) == len(completions)\n"
        "    return [float(text) for text in verdict]\n"
    )
    by_group = (f"reward.target={tmp_path / 'group.py'}:score", "steps=3")
    grouped = trained(tmp_path / "grouped", *by_group)
    alone = trained(tmp_path / "alone", "steps=3")
    assert [line.get("sampled/reward") for line in grouped] == [
        line.get("sampled/reward") for line in alone
    ]


def test_a_judge_reads_all_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUPLER_PLUGINS", "played_environments")
    SEEN.clear()
    given = arguments(
        tmp_path, "environment=played", "environment.how=scored", "sampling.max_tokens=64",
        "rollout@judge.rollout=kept", "steps=1",
    )  # fmt: skip
    tmp_path.joinpath("question.txt").write_text("Judge this. {conversation}")
    assert main(["train", *given]) == 0

    codec = Codec(Model(str(tmp_path / "judge")))
    asked = [codec.decode(request.prompt) for request, _ in SEEN.sampled]
    assert len(asked) == 4 * 4 and max(text.count("\n\nassistant: ") for text in asked) > 1
    for text in asked:
        turns = text.removeprefix("Judge this. user: ").split("\n\n")
        assert len(turns) % 2 == 0 and "+ 2 =" in turns[0]
        for i, turn in enumerate(turns[2::2]):
            assert turn == f"user: {i} ?"


def test_a_judge_reads_which_tools_were_called() -> None:
    call = {"id": "7", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = (
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2"},
    )
    said = 'user: 1 + 1\n\nassistant: [calls add({"a": 1})]\n\ntool: 2\n\nassistant: It is 2'
    assert shown(messages) == said


@pytest.mark.parametrize(
    ("question", "more", "sentence"),
    [
        ("{prompt}", (), "has no field {completion}"),
        ("{completion} {respose}", (), "has a field {respose}, which nothing fills"),
        (None, (), "question.txt"),
        ("{completion}", ("judge.prompt=",), "judge.prompt is empty"),
        ("{completion}", ("judge.pattern='(\\d'",), "is no regular expression"),
        ("{completion}", ("judge.pattern='\\d'",), "has no group"),
        ("{completion}", ("judge.model.path=/none",), "judge.model.path=/none"),
        ("{completion}", ("judge.max_tokens=0",), "judge.max_tokens must be at least 1"),
        ("{completion}", ("judge.rollout.replicas=2",), "judge.rollout.replicas=2 needs more than"),
        ("{completion}", ("offload=true",), "offload=true needs"),
    ],
)  # fmt: skip
def test_a_judge_that_cannot_be_asked_is_one_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    question: str | None,
    more: tuple[str, ...],
    sentence: str,
) -> None:
    given = arguments(tmp_path, *more)
    file = tmp_path / "question.txt"
    file.unlink() if question is None else file.write_text(question)
    assert main(["plan", *given]) == 2
    assert sentence in capsys.readouterr().err


def test_a_rollout_of_no_judge_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text("def score(completion):\n    return 1.0\n")
    own = ("judge.model.path=", f"reward.target={tmp_path / 'own.py'}:score")
    assert main(["plan", *arguments(tmp_path, *own, "rollout@judge.rollout=toy")]) == 2
    assert "judge.rollout is chosen, and judge.model.path is empty" in capsys.readouterr().err


def test_a_judge_without_room_for_the_question_is_refused(
    tmp_path: Path, judge: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = ("data.max_prompt_tokens=200", "sampling.max_tokens=200", "judge.max_tokens=200")
    given = arguments(tmp_path, *longer, f"judge.model.path={judge}")
    assert main(["plan", *given]) == 2
    assert "positions for 512 tokens" in capsys.readouterr().err


def test_the_plan_names_the_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments(tmp_path)]) == 0
    assert "judge (toy)" in capsys.readouterr().out
