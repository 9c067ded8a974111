"""``algorithm=ppo`` from its command line: a policy and a critic on engine=fsdp, and
the folders they leave.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from job_run import metrics, replayed, reproducible, run
from transformers import AutoModelForTokenClassification

from coupler.batch import Batch
from coupler.interfaces import Head, Model, Output, Part, Rank
from coupler_engine_fsdp.config import FSDPConfig
from coupler_engine_fsdp.engine import FSDPEngine

PPO = (
    "algorithm=ppo", "critic.engine.lr=3e-3", "critic.warmup_steps=1",
    "optimizer_steps_per_batch=2",
    "algorithm.kl_target=1.0", "algorithm.dual_clip=3.0", "strict=true",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of three steps, the first of which warms the critic up."""
    kept = ("record.every_steps=1", "checkpoint.every_steps=1")
    return run("train", model, tmp_path_factory.mktemp("ppo") / "run", *PPO, *kept)


def values_of(model: Model, checkpoint: Path | None) -> np.ndarray:
    """The values of some tokens, by an engine of the job's own."""
    engine = FSDPEngine(FSDPConfig(), model)
    engine.setup(Rank())
    if checkpoint:
        engine.load(checkpoint, frozenset({Part.PARAMS}))
    tokens = np.arange(10, 22, dtype=np.int32)
    batch = Batch(np.array([12]), {"tokens": tokens, "loss_mask": np.arange(12) > 0})
    return engine.forward(batch, (Output("values"),))["values"][1:]


def test_every_role_reports(trained: Path) -> None:
    log = metrics(trained)
    assert [("loss" in line, "critic/loss" in line) for line in log] == [
        (False, False),
        (False, True),
        *[(True, True)] * 2,
    ]
    last = log[-1]
    assert last["train/lr"] == 1e-2 and last["critic/lr"] == pytest.approx(3e-3)
    assert log[1]["critic/values"] == 0.0 != last["critic/values"]
    assert {
        "critic/clip_fraction",
        "critic/explained_variance",
        "clip_low",
        "clip_high",
        "clip_dual",
    } <= last.keys()
    assert log[1]["kl/coef"] == 0.02 and log[1]["kl/trajectory"] == pytest.approx(0.0, abs=1e-4)


def test_checkpoint_and_export_of_the_critic_hold_the_same_values(
    trained: Path, model: Path
) -> None:
    """Transformers loads the export by itself; a critic that starts from it has its
    values.
    """
    saved = values_of(
        Model(str(model), head=Head.VALUE), trained / "checkpoints" / "step_3" / "critic"
    )
    again = values_of(Model(str(trained / "export_critic"), head=Head.VALUE), None)
    plain = (
        AutoModelForTokenClassification.from_pretrained(trained / "export_critic").float().eval()
    )
    with torch.no_grad():
        logits = plain(torch.arange(10, 22)[None]).logits[0, :-1, 0].numpy()
    assert np.abs(saved).max() > 1e-2
    np.testing.assert_array_equal(again, saved)
    np.testing.assert_allclose(logits, saved, atol=1e-5)
    manifest = json.loads((trained / "checkpoints" / "step_3" / "MANIFEST.json").read_text())
    assert manifest["step"] == 3 and manifest["roles"].keys() == {"policy", "critic"}


def test_replaying_a_stage_gives_what_the_run_had(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def differences(step: int, stage: str) -> dict[str, float]:
        return {name: abs(row[-1]) for name, row in replayed(trained, step, stage, capsys).items()}

    for stage in ("train", "values", "advantages"):
        assert set(differences(3, stage).values()) == {0.0}, stage
    assert max(differences(3, "logprobs").values()) < 1e-4
    assert {"loss", "critic/loss", "critic/grad_norm"} <= differences(3, "train").keys()
    # from the model itself: no checkpoint comes before it
    warming = differences(1, "train")
    assert set(warming.values()) == {0.0} and "critic/loss" in warming and "loss" not in warming


def test_the_policy_of_a_warm_up_is_the_model(model: Path, tmp_path: Path) -> None:
    """Two of two steps train the critic only: what is exported is what was there,
    tensor by tensor.

    With a schedule that ends with the run, of which the policy takes no optimizer step.
    """
    schedule = ("engine.schedule=cosine", "engine.warmup_ratio=0.1")
    folder = run(
        "train", model, tmp_path / "run", *PPO[:2], "critic.warmup_steps=2", "steps=2", *schedule
    )
    from coupler.testing.models import read_tensors

    before, after = read_tensors(model), read_tensors(folder / "export")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor, err_msg=name)


def test_each_role_s_schedule_ends_after_its_own_steps(model: Path, tmp_path: Path) -> None:
    """The policy takes two optimizer steps in each of two steps, the critic one in each
    of three; it warms up for half of them: two, and one, since a part of a step is
    none.
    """
    more = (
        "engine.schedule=linear",
        "engine.warmup_ratio=0.5",
        "critic.optimizer_steps_per_batch=1",
    )
    lines = metrics(run("train", model, tmp_path / "run", *PPO, *more))[1:]
    policy, critic = (
        [line[key] for line in lines if key in line] for key in ("train/lr", "critic/lr")
    )
    assert policy == pytest.approx([1e-2 * (0.5 + 1) / 2, 1e-2 * (1 + 0.5) / 2])
    assert critic == pytest.approx([3e-3, 3e-3, 1.5e-3])


def test_two_runs_are_equal_and_a_critic_can_start_elsewhere(
    trained: Path, model: Path, tmp_path: Path
) -> None:
    again = run("train", model, tmp_path / "again" / "run", *PPO)
    assert reproducible(again) == reproducible(trained)
    elsewhere = f"critic.model.path={trained / 'export_critic'}"
    other = metrics(run("train", model, tmp_path / "other" / "run", *PPO, elsewhere))
    assert other[1]["critic/values"] != 0.0


def test_the_start_has_no_kl_with_one_optimizer_step_a_batch(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Policy and reference are the same weights in the same engine, whatever the
    rollout rounds.
    """
    settings = ("algorithm=rloo", "algorithm.kl_target=1.0", "algorithm.log_entropy=false")
    kept = ("record.every_steps=1", "checkpoint.every_steps=1")
    folder = run("train", model, tmp_path / "run", *settings, *kept)
    log = metrics(folder)
    assert log[1]["kl/trajectory"] == 0.0 != log[2]["kl/trajectory"]
    assert {line["ratio_max"] for line in log[1:]} == {1.0}
    for stage in ("train", "advantages"):
        assert {row[-1] for row in replayed(folder, 3, stage, capsys).values()} == {0.0}, stage


def test_rollouts_may_run_ahead(model: Path, tmp_path: Path) -> None:
    """Policy and critic train in threads side by side while the rollout samples."""
    folder = run(
        "train", model, tmp_path / "run", *PPO, "max_staleness=1", "algorithm.behaviour=rollout"
    )
    assert metrics(folder)[-1]["critic/value_loss"] > 0
