"""A run learns from answers of its rows beside samples, on a small Qwen2."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from job_run import arguments, metrics, run, write_inputs
from test_distillation import by_turns

from coupler.batch import Batch
from coupler.batch.trajectory import Origin
from coupler.cli import main
from coupler.conversation.packing import ORIGINS
from coupler.data import Codec
from coupler.interfaces import Model
from coupler.run import samples
from coupler.testing.models import write_qwen2

ALONE = ("algorithm.sources={*: {demo: 1}}", "algorithm.kl=none", "data.shuffle=false")
MIXED = (
    "algorithm.sources={math: {rl: 1, ref: 0.1}, chat: {demo: 0.5}, both: {rl: 1, demo: 2}}",
    "algorithm.kl=none", "data.shuffle=false", "prompts_per_step=6", "steps=2",
    "record.every_steps=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen2(tmp_path_factory.mktemp("models") / "policy", tied=True)


def test_a_run_of_answers_alone_is_supervised_training(tmp_path: Path, policy: Path) -> None:
    """Over two steps its losses and gradients are those of coupler sft, whatever the
    sampling temperature is.
    """
    same = ("steps=2", "prompts_per_step=3")
    more = ("sampling.temperature=0.7", "algorithm.aggregation=token_mean", *ALONE, *same)
    taught = metrics(run("train", policy, tmp_path / "a" / "run", *more))
    sft = metrics(run("sft", policy, tmp_path / "b" / "run", "data.shuffle=false", *same))
    for mine, other in zip(taught[-2:], sft[-2:], strict=True):
        assert mine["nll_demo"] == pytest.approx(other["nll"], rel=1e-5)
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert mine["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-4)
        assert mine["demonstrations/rows"] == 3
        assert "reward/mean" not in mine
        assert "sampling/surprise" not in mine
    assert taught[-1]["nll_demo"] < taught[-2]["nll_demo"]


def test_rewards_and_answers_are_mixed_by_source(tmp_path: Path, policy: Path) -> None:
    """Each part has its rows, and micro-batches of any size give the same numbers."""
    write_inputs(tmp_path)
    source = by_turns(tmp_path, "data_source", "math", "chat", "both")
    found: list[list[dict[str, float]]] = []
    for name, tokens in (("small", 72), ("large", 1024)):
        given = arguments("train", policy, tmp_path, tmp_path / name)
        more = (*MIXED, f"data.source={source}", f"engine.max_tokens_per_gpu={tokens}")
        assert main([*given, *more]) == 0
        found.append(metrics(tmp_path / name))
    for small, large in zip(*(log[1:] for log in found), strict=True):
        for key in ("loss", "train/grad_norm", "nll_demo", "kl_ref", "policy_loss"):
            assert small[key] == pytest.approx(large[key], rel=1e-3, abs=1e-5), key

    first = found[0][1]
    assert (first["demonstrations/rows"], first["batch/sequences"]) == (4, 2 * 4 + 2 * 3)
    assert first["train_infer/abs_diff"] < 1e-4
    batch = Batch.load(next((tmp_path / "small" / "record").rglob("*_1/*.npz")))
    check_rows(batch, policy)
    lines = samples.read(tmp_path / "small" / samples.FOLDER, 1)
    shown = [line for line in lines if line["version"] is None]
    assert shown[0]["completion"].startswith("3")
    assert main(["replay", str(tmp_path / "small"), "--step", "1", "--stage", "advantages"]) == 0


def check_rows(batch: Batch, policy: Path) -> None:
    codec = Codec(Model(str(policy)))
    shown, source = batch["demonstration"], batch["data_source"]
    assert shown.sum() == 4
    assert shown[source == "chat"].all()
    assert not shown[source == "math"].any()
    assert (np.bincount(batch["row"]) == [4, 1, 4, 4, 1, 4]).all()

    for row in np.flatnonzero(shown).tolist():
        one = batch.take([row])
        number, mask = int(one["row"][0]), one["loss_mask"]
        prompt, answer = codec.example_ids(f"what is {number} + 2 ?", str(number + 2))
        assert one["tokens"].tolist() == [*prompt, *answer]
        assert one["tokens"][mask].tolist() == list(answer)
        assert (one["version"] == -1).all()
        assert (one["origin"][mask] == ORIGINS.index(Origin.TARGET)).all()
        assert not one["advantages"].any()
    tokens = batch.spread(shown) & batch["loss_mask"]
    assert ((batch["component_demo"] > 0) == tokens).all()
    assert not batch["component_rl"][tokens].any()
    assert not batch["component_ref"][tokens].any()


def test_answers_go_with_samples_among_the_most_likely_tokens(tmp_path: Path, policy: Path) -> None:
    """Every id is left to the tokens of an answer."""
    more = (*ALONE[1:], "algorithm.sources={*: {rl: 1, demo: 1}}", "sampling.top_k=4", "steps=1")
    log = metrics(run("train", policy, tmp_path / "run", *more, "record.every_steps=1"))
    batch = Batch.load(next((tmp_path / "run" / "record").rglob("*.npz")))
    of_answers = batch.spread(batch["demonstration"]) & batch["loss_mask"]
    assert (batch["sampling_mask"][of_answers] == -1).all()
    assert (batch["sampling_mask"][batch["loss_mask"] & ~of_answers] >= 0).any()
    assert log[1]["nll_demo"] > 2


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("environment=toy", "learns from answers of the rows, and environment=toy has turns"),
        ("router_replay=R3", "router_replay=R3"),
        ("sampling.max_tokens=1", "has an answer of 2 tokens to learn from"),
        ("data.answer_key=''", "has an empty answer: there is nothing to imitate"),
    ],
)
def test_what_answers_do_not_go_with_is_refused(
    tmp_path: Path,
    policy: Path,
    capsys: pytest.CaptureFixture[str],
    override: str,
    sentence: str,
) -> None:
    write_inputs(tmp_path)
    given = arguments("train", policy, tmp_path, tmp_path / "run")
    assert main([*given, *ALONE, override]) == 2
    assert sentence in capsys.readouterr().err


def test_an_answer_whose_reward_is_invalid_is_not_learnt(
    tmp_path: Path, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    (tmp_path / "reward.py").write_text("def score(completion):\n    raise ValueError('no')\n")
    given = arguments("train", policy, tmp_path, tmp_path / "run")
    assert main([*given, *ALONE]) == 2
    assert "ValueError: no" in capsys.readouterr().err
