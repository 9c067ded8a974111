"""A sequence classifier scores episodes: its numbers, its batches, and whole runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job_run import metrics, reproducible, run
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from coupler.batch import Batch
from coupler.cli import main
from coupler.data import Codec, Prompt, Row
from coupler.interfaces import Head, Message, Model, Output, Rank
from coupler.rewards import Invalid
from coupler.rewards.opinions import Episode, Opinion
from coupler.rewards.reward_model import RewardModel
from coupler.testing.models import (
    read_tensors,
    rewrite,
    write_classifier,
    write_qwen2,
    write_tokenizer,
    write_toy,
    write_value_head,
)
from coupler_engine_fsdp.config import FSDPConfig
from coupler_engine_fsdp.engine import FSDPEngine

EVALUATED = ("eval.at_start=true", "eval.every_steps=3", "eval.data.max_prompt_tokens=64")
ROLES = ("user", "assistant")
ROWS = "".join(json.dumps({"prompt": f"{i} + 2 =", "answer": str(i)}) + "\n" for i in range(6))
TEXTS = ("3", "hello world", "", "the answer is 3 . " * 6, "yes no maybe <|im_end|> no", "7 = 5")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("classifier"), seed=5)


def talk(*texts: str) -> tuple[Message, ...]:
    """A conversation in which the user and the policy take turns."""
    return tuple({"role": ROLES[i % 2], "content": text} for i, text in enumerate(texts))


def by_transformers(folder: Path, *texts: str) -> float:
    """The score of a conversation, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).float().eval()
    ids = tokenizer.apply_chat_template(talk(*texts), return_tensors="pt", return_dict=True)
    with torch.no_grad():
        return float(model(**ids).logits[0, 0])


def samples(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """What an evaluation scored."""
    return [json.loads(line) for line in (run_dir / f"eval_{step}.jsonl").read_text().splitlines()]


class Counted:
    """A classifier on engine=fsdp, which notes the sequences of each pass."""

    def __init__(self, folder: Path) -> None:
        self.engine = FSDPEngine(FSDPConfig(), Model(str(folder), head=Head.VALUE))
        self.engine.setup(Rank())
        self.passes: list[int] = []

    async def forward(self, batch: Batch) -> np.ndarray:
        self.passes.append(len(batch))
        await asyncio.sleep(0)
        return self.engine.forward(batch, (Output("values"),))["values"]


@pytest.fixture(scope="module")
def counted(classifier: Path) -> Iterator[Counted]:
    made = Counted(classifier)
    yield made
    made.engine.close()


def prompt_of(text: str) -> Prompt:
    return Prompt(Row(text, "", 0, {}), (5,), ({"role": "user", "content": text},))


def asked(model: RewardModel, texts: tuple[str, ...]) -> list[Opinion | Invalid]:
    """The opinions of completions that are asked for at once."""

    async def together() -> list[Opinion | Invalid]:
        prompt = prompt_of("what is 1 + 2 ?")
        return await asyncio.gather(*(model.ask(prompt, Episode(text)) for text in texts))

    return asyncio.run(together())


def scores(found: list[Opinion | Invalid]) -> list[float]:
    assert all(isinstance(one, Opinion) for one in found), found
    return [float(one.said) for one in found if isinstance(one, Opinion)]


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_the_score_is_that_of_transformers(
    model: Path, classifier: Path, tmp_path: Path, engine: str
) -> None:
    pytest.importorskip(f"coupler_engine_{engine}.engine")
    by_model = (
        f"engine@reward_model.engine={engine}", f"reward_model.model.path={classifier}",
        "reward_model.engine.dtype=fp32", "reward.target=", "strict=true", "algorithm.kl=none",
    )  # fmt: skip
    folder = run(
        "train", model, tmp_path / "run", "algorithm=grpo", *by_model, *EVALUATED,
        f"eval.data.source={tmp_path / 'rows.jsonl'}", "steps=1",
    )  # fmt: skip

    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for sample in samples(folder, 0):
        want = by_transformers(classifier, rows[sample["row"]]["prompt"], sample["completion"])
        assert sample["score"] == pytest.approx(want, abs=1e-5)
        assert sample["reward"] == sample["score"]
    last = metrics(folder)[-1]
    assert last["reward_model/invalid_rate"] == 0.0 and last["time/reward_model"] > 0


def test_a_score_does_not_depend_on_the_batch(classifier: Path, counted: Counted) -> None:
    codec = Codec(Model(str(classifier)))
    counted.passes.clear()
    together = scores(asked(RewardModel(codec, counted.forward, (99, ""), 3), TEXTS))
    assert counted.passes == [len(TEXTS)], "what is asked for at once is one pass"

    alone = scores(asked(RewardModel(codec, counted.forward, (99, ""), 3, alone=True), TEXTS))
    assert counted.passes[1:] == [1] * len(TEXTS)
    assert together == pytest.approx(alone, abs=1e-5)
    assert len({round(score, 3) for score in alone}) == len(TEXTS)
    plain = [text for text in TEXTS if "<|" not in text]
    want = [by_transformers(classifier, "what is 1 + 2 ?", text) for text in plain]
    assert [s for s, t in zip(alone, TEXTS, strict=True) if t in plain] == pytest.approx(
        want, abs=1e-5
    )


def test_all_turns_of_an_episode_are_scored(classifier: Path, counted: Counted) -> None:
    texts = ("what is 1 + 2 ?", "4", "look again", "3")
    model = RewardModel(Codec(Model(str(classifier))), counted.forward, (99, ""), None)
    episode = Episode("3", talk(*texts))
    found = scores([asyncio.run(model.ask(prompt_of(texts[0]), episode))])
    assert found == pytest.approx([by_transformers(classifier, *texts)], abs=1e-5)
    assert found[0] != pytest.approx(by_transformers(classifier, texts[0], texts[-1]), abs=1e-3)


def test_while_one_pass_runs_others_gather(classifier: Path, counted: Counted) -> None:
    model = RewardModel(Codec(Model(str(classifier))), counted.forward, (99, ""), 3)
    counted.passes.clear()

    async def story() -> None:
        first = asyncio.create_task(model.ask(prompt_of("1"), Episode("3")))
        while not counted.passes:
            await asyncio.sleep(0)
        await asyncio.gather(first, *(model.ask(prompt_of("1"), Episode(text)) for text in TEXTS))

    asyncio.run(story())
    assert counted.passes == [1, len(TEXTS)]
    assert model.metrics()["reward_model/episodes_per_pass"].value == (1 + len(TEXTS)) / 2


def test_padding_at_the_end_is_not_the_last_token(classifier: Path, counted: Counted) -> None:
    """Transformers reads the score at the last token that is not ``pad_token_id``."""
    codec, newline = Codec(Model(str(classifier))), 10
    ids = codec.conversation_ids(talk("1", "3"))
    newline = ids[-1]
    model = AutoModelForSequenceClassification.from_pretrained(classifier).float().eval()
    model.config.pad_token_id = newline
    with torch.no_grad():
        want = float(model(torch.tensor([ids])).logits[0, 0])

    at_newline = RewardModel(codec, counted.forward, (99, ""), newline)

    async def one() -> Opinion | Invalid:
        return await at_newline.ask(prompt_of("1"), Episode("3"))

    assert scores([asyncio.run(one())]) == pytest.approx([want], abs=1e-5)


def test_what_cannot_be_scored_is_invalid(classifier: Path) -> None:
    async def broken(batch: Batch) -> np.ndarray:
        return np.full(batch.num_tokens, np.nan, np.float32)

    async def failing(batch: Batch) -> np.ndarray:
        raise RuntimeError("the engine fell over")

    codec = Codec(Model(str(classifier)))
    room = (30, "reward_model.engine.max_tokens_per_gpu=31")
    long, short = asked(RewardModel(codec, broken, room, None), ("hello " * 60, "3"))
    assert isinstance(long, Invalid) and "takes 1 to 30 tokens (reward_model.engine" in long.reason
    assert isinstance(short, Invalid) and short.reason == "the reward model gave the score nan"
    with pytest.raises(RuntimeError, match="fell over"):
        asked(RewardModel(codec, failing, room, None), ("3", "4"))


def test_training_raises_the_score(model: Path, classifier: Path, tmp_path: Path) -> None:
    folder = run(
        "train", model, tmp_path / "run", "algorithm=grpo", "steps=12", "samples_per_prompt=8",
        f"reward_model.model.path={classifier}", "reward.target=", "engine.lr=5e-3",
        "checkpoint.export=false",
    )  # fmt: skip
    rewards = [line["sampled/reward"] for line in metrics(folder)[1:]]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.3, rewards


@pytest.mark.parametrize("group", [False, True])
def test_a_function_gets_the_score(
    model: Path, classifier: Path, tmp_path: Path, group: bool
) -> None:
    """With groups of equal rewards left out, as DAPO does, or whole ones as a list."""
    one = "def score(completion, score, row):\n    assert row['score'] == score\n"
    many = "def score(completions, score):\n    assert len(score) == len(completions)\n"
    body = many + "    return [s + 100 for s in score]\n" if group else one
    body += "" if group else "    return {'reward': score + 100, 'raw': score}\n"
    (tmp_path / "of_score.py").write_text(body)
    folder = run(
        "train", model, tmp_path / "run", "algorithm=dapo", "engine.lr=1e-4",
        "algorithm.overlong_buffer_tokens=1",
        f"reward_model.model.path={classifier}", "reward_model.engine.max_tokens_per_gpu=128",
        f"reward.target={tmp_path / 'of_score.py'}:score", "strict=true",
    )  # fmt: skip
    last = metrics(folder)[-1]
    assert last["reward/invalid_rate"] == 0.0
    assert last["sampled/reward"] == pytest.approx(last["reward_model/score"] + 100, abs=1e-3)
    assert "sampled/rejected_groups" in last


# --- on the toy backends


def arguments(folder: Path, *more: str) -> list[str]:
    """Return the command line of a toy run with a toy classifier."""
    write_tokenizer(write_toy(folder / "model"))
    write_value_head(folder / "model", folder / "scorer", 8, seed=3)
    (folder / "rows.jsonl").write_text(ROWS)
    return [
        "engine=toy", "engine.lr=1.0", "rollout=toy", "algorithm=toy", "steps=4",
        f"model.path={folder / 'model'}", f"run_dir={folder / 'run'}",
        f"data.source={folder / 'rows.jsonl'}", "data.max_prompt_tokens=64",
        "prompts_per_step=4", "samples_per_prompt=4", "sampling.max_tokens=4",
        "deterministic=true", "strict=true", "trackers=[jsonl]",
        f"reward_model.model.path={folder / 'scorer'}", *more,
    ]  # fmt: skip


def trained(folder: Path, *more: str) -> list[dict[str, float]]:
    """Train on the toy backends, and return what is equal in equal runs."""
    folder.mkdir(exist_ok=True)
    assert main(["train", *arguments(folder, *more)]) == 0
    return [
        {k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))}
        for line in metrics(folder / "run")
    ]


def test_a_resumed_run_is_scored_the_same(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole")
    trained(tmp_path / "cut", "steps=2")
    again = trained(tmp_path / "cut", "strict=false")
    assert len({line["reward_model/score"] for line in whole[1:]}) > 1
    for name in ("reward_model/score", "sampled/reward", "loss"):
        assert again[-1][name] == whole[-1][name]


def test_an_evaluation_job_asks_the_model(tmp_path: Path) -> None:
    given = [
        word for word in arguments(tmp_path)
        if not word.startswith(("algorithm", "engine.lr", "steps", "data.", "prompts_", "samples_"))
    ]  # fmt: skip
    held_out = (f"eval.data.source={tmp_path / 'rows.jsonl'}", "eval.data.max_prompt_tokens=64")
    assert main(["eval", *given, *held_out]) == 0
    lines = (tmp_path / "run" / "eval.jsonl").read_text().splitlines()
    assert all(json.loads(line)["score"] == json.loads(line)["reward"] for line in lines)


BOTH = """
def score(completion, score, verdict):
    return {"reward": score + len(verdict) / 10, "length": len(verdict)}
"""


@pytest.mark.slow
def test_ray_gives_the_same_numbers(cluster: str, tmp_path: Path) -> None:
    """A classifier and a judge, each in processes of its own, and two of the judge."""
    (tmp_path / "both.py").write_text(BOTH)
    (tmp_path / "question.txt").write_text("{prompt}{completion}")
    asked = (
        f"reward.target={tmp_path / 'both.py'}:score", "steps=2", "judge.temperature=1",
        f"judge.prompt={tmp_path / 'question.txt'}", "judge.max_tokens=8",
    )  # fmt: skip
    logs = []
    for name, more in (("local", ()), ("ray", ("judge.rollout.replicas=2",))):
        judge = f"judge.model.path={tmp_path / name / 'model'}"
        logs.append(trained(tmp_path / name, *asked, judge, f"executor={name}", *more))

    assert logs[0] == logs[1] and logs[0][-1]["judge/tokens"] > 1
    folder = tmp_path / "ray" / "run" / "logs"
    assert {"judge-1.log", "reward_model-0.log"} <= {path.name for path in folder.iterdir()}


def test_with_offload_they_take_turns(model: Path, classifier: Path, tmp_path: Path) -> None:
    """The judge's cache and the classifier leave the device while the policy trains."""
    (tmp_path / "both.py").write_text(BOTH)
    (tmp_path / "question.txt").write_text("{completion}")
    asked = (
        f"reward.target={tmp_path / 'both.py'}:score", f"judge.model.path={model}",
        f"judge.prompt={tmp_path / 'question.txt'}", "judge.max_tokens=4",
        "judge.rollout.dtype=fp32", f"reward_model.model.path={classifier}",
        "algorithm=grpo", "steps=2", "deterministic=true", "checkpoint.export=false",
    )  # fmt: skip
    kept = run("train", model, tmp_path / "kept" / "run", *asked)
    turns = run("train", model, tmp_path / "turns" / "run", *asked, "offload=true")
    assert reproducible(kept) == reproducible(turns)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders that are no classifier with one label."""
    root = tmp_path_factory.mktemp("folders")
    headless = write_classifier(root / "whole")
    tensors = read_tensors(headless)
    tensors.pop("score.weight")
    return {
        "two": write_classifier(root / "two", labels=2),
        "causal": write_qwen2(root / "causal", tied=True),
        "headless": rewrite(headless, root / "headless", tensors),
        "nothing": root / "nothing",
    }


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("two", "has a head score.weight of shape [2, 128], and a reward needs one label"),
        ("causal", "holds a Qwen2ForCausalLM, which gives no score"),
        ("headless", "has no tensor score.weight"),
        ("nothing", "reward_model.model.path="),
    ],
)
def test_a_folder_without_such_a_head_is_refused(
    tmp_path: Path,
    folders: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    name: str,
    sentence: str,
) -> None:
    given = arguments(tmp_path, f"reward_model.model.path={folders[name]}")
    for command in ("plan", "train"):
        assert main([command, *given]) == 2
        assert sentence in capsys.readouterr().err


def test_two_rewards_without_a_function_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "question.txt").write_text("{completion}")
    both = (f"judge.model.path={tmp_path / 'model'}", f"judge.prompt={tmp_path / 'question.txt'}")
    assert main(["plan", *arguments(tmp_path, *both)]) == 2
    assert "reward.target is empty: which of both is the reward?" in capsys.readouterr().err


def test_a_column_of_the_same_name_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 2 =", "answer": "3", "score": 4}\n')
    assert main(["train", *given]) == 2
    assert "has a column score, which is what a model says" in capsys.readouterr().err


def test_supervised_training_has_no_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word for word in arguments(tmp_path) if not word.startswith(("rollout", "sampl"))]
    assert main(["sft", *given, "algorithm=sft", "strict=false"]) == 2
    assert "reward_model.model.path scores what is sampled" in capsys.readouterr().err


def test_the_plan_and_the_doctor_name_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(tmp_path)
    assert main(["plan", *given]) == 0
    assert "reward_model (engine toy)" in capsys.readouterr().out
    main(["doctor", *given])
    assert "is a sequence classifier with one label" in capsys.readouterr().out
