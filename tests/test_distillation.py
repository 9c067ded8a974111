"""A run learns from a teacher, on a small Qwen2 with random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from job_run import arguments, metrics, run, write_inputs

from coupler.batch import Batch
from coupler.cli import main
from coupler.data import Codec
from coupler.interfaces import Model
from coupler.testing.models import write_qwen2
from coupler.testing.reference import TransformersReference


def by_turns(folder: Path, column: str, *values: str) -> Path:
    """Write the rows once more, with a column whose values take turns."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    more = [{**row, column: values[i % len(values)]} for i, row in enumerate(rows)]
    path = folder / f"{column}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in more))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A policy and a teacher with other weights."""
    folder = tmp_path_factory.mktemp("models")
    teacher = write_qwen2(folder / "teacher", tied=False, seed=7)
    return write_qwen2(folder / "policy", tied=True), teacher


def distil(models: tuple[Path, Path], run_dir: Path, *overrides: str) -> list[dict[str, float]]:
    policy, teacher = models
    given = (f"teacher.model.path={teacher}", "algorithm=opd", "samples_per_prompt=1")
    return metrics(run("train", policy, run_dir, *given, *overrides))


def test_the_policy_comes_nearer_to_the_teacher(tmp_path: Path, models: tuple[Path, Path]) -> None:
    log = distil(models, tmp_path / "run", "steps=24", "prompts_per_step=6", "engine.lr=3e-3")
    distance = [step["kl_teacher"] for step in log[1:]]
    first, last = np.mean(distance[:3]), np.mean(distance[-6:])
    assert first > 1
    assert last < 0.8 * first  # 0.5 to 0.7 with three seeds


def test_a_teacher_that_is_the_policy_teaches_nothing(
    tmp_path: Path, models: tuple[Path, Path]
) -> None:
    """It has an engine of its own, and both take turns on the device."""
    policy = models[0]
    log = distil((policy, policy), tmp_path / "run", "steps=1", "offload=true")
    assert abs(log[1]["kl_teacher"]) < 1e-6
    assert log[1]["train/grad_norm"] < 1e-5


def test_a_teacher_of_another_family_is_refused(
    tmp_path: Path, models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(models[1], other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))

    write_inputs(tmp_path)
    given = arguments("train", models[0], tmp_path, tmp_path / "run")
    assert main([*given, "algorithm=opd", f"teacher.model.path={other}"]) == 2
    assert "reads other tokens than the policy samples: 2 differ" in capsys.readouterr().err


def test_each_row_learns_from_its_teacher(tmp_path: Path, models: tuple[Path, Path]) -> None:
    """Half of the rows have the policy itself for their teacher, which the other half
    must not change.
    """
    policy, teacher = models
    write_inputs(tmp_path)
    source = by_turns(tmp_path, "teacher", "same", "other")

    given = arguments("train", policy, tmp_path, tmp_path / "run")
    both = f"teacher.models={{same: {policy}, other: {teacher}}}"
    more = ("algorithm=opd", both, f"data.source={source}", "data.shuffle=false", "steps=1")
    assert main([*given, *more, "record.every_steps=1"]) == 0
    batch = Batch.load(next((tmp_path / "run" / "record").rglob("*.npz")))
    apart = np.abs(batch["teacher_logprobs"] - batch["old_logprobs"]) * batch["loss_mask"]
    largest = np.maximum.reduceat(apart, batch.starts[:-1])
    assert largest[batch["row"] % 2 == 0].max() < 1e-5
    assert largest[batch["row"] % 2 == 1].min() > 0.1


def test_the_policy_learns_from_what_it_says_to_another_prompt(
    tmp_path: Path, models: tuple[Path, Path]
) -> None:
    """The column is that of transformers behind the text with the answer."""
    policy = models[0]
    write_inputs(tmp_path)
    (tmp_path / "hint.txt").write_text("{prompt} it is {answer} .")
    given = arguments("train", policy, tmp_path, tmp_path / "run")
    more = ("algorithm=opd", f"teacher.prompt={tmp_path / 'hint.txt'}", "steps=1")
    assert main([*given, *more, "record.every_steps=1"]) == 0

    batch = Batch.load(next((tmp_path / "run" / "record").rglob("*.npz")))
    codec, reference = Codec(Model(str(policy))), TransformersReference(policy)
    for row in range(len(batch)):
        one = batch.take([row])
        number = int(one["row"][0])
        shown = codec.prompt_ids(f"what is {number} + 2 ? it is {number + 2} .", "")
        sampled = tuple(one["tokens"][one["loss_mask"]].tolist())
        expected = reference.logprobs_of(shown, sampled, 1.0)
        assert one["teacher_logprobs"][one["loss_mask"]] == pytest.approx(expected, abs=1e-4)


def test_rows_learn_by_their_kind(tmp_path: Path, models: tuple[Path, Path]) -> None:
    """Half of the rows learn from rewards and half from the teacher, over two optimizer
    steps, and micro-batches of any size give the same numbers.
    """
    policy, teacher = models
    write_inputs(tmp_path)
    source = by_turns(tmp_path, "data_source", "math", "chat")
    more = (
        "algorithm.sources={math: {rl: 1}, chat: {teacher: 1, ref: 0.1}}", "algorithm.kl=none",
        f"teacher.model.path={teacher}", f"data.source={source}", "data.shuffle=false",
        "steps=2", "record.every_steps=1", "prompts_per_step=4", "optimizer_steps_per_batch=2",
    )  # fmt: skip

    found: list[list[dict[str, float]]] = []
    for name, tokens in (("small", 72), ("large", 1024)):
        given = arguments("train", policy, tmp_path, tmp_path / name)
        assert main([*given, *more, f"engine.max_tokens_per_gpu={tokens}"]) == 0
        found.append(metrics(tmp_path / name))
    for small, large in zip(*(log[1:] for log in found), strict=True):
        for key in ("loss", "train/grad_norm", "kl_teacher", "kl_ref", "policy_loss"):
            assert small[key] == pytest.approx(large[key], rel=1e-3, abs=1e-5), key

    batch = Batch.load(next((tmp_path / "small" / "record").rglob("*.npz")))
    chat = batch.spread(batch["row"] % 2 == 1)
    assert (batch["data_source"] == np.where(batch["row"] % 2, "chat", "math")).all()
    assert not batch["component_rl"][chat].any()
    assert not batch["component_teacher"][~chat].any()
    assert np.abs(batch["advantages_of_teacher"][chat]).max() > 0.1
    assert main(["replay", str(tmp_path / "small"), "--step", "1", "--stage", "advantages"]) == 0


def test_a_kind_of_row_without_a_loss_ends_the_run(
    tmp_path: Path, models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    given = arguments("train", models[0], tmp_path, tmp_path / "run")
    more = ("algorithm.sources={math: {rl: 1}}", "algorithm.kl=none", "steps=1")
    assert main([*given, *more]) == 2
    assert "a row has data_source='', which algorithm.sources does" in capsys.readouterr().err
