"""The three jobs from their command line: engine=fsdp and rollout=hf on a small Qwen2,
and the folders they leave.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from job_run import arguments, metrics, replayed, reproducible, run, write_inputs
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from coupler.batch import Batch
from coupler.cli import main
from coupler.config.compose import compose
from coupler.config.schema import Job
from coupler.interfaces import Model, Output, Part, Rank
from coupler.plugins.manager import Plugins
from coupler.system.seeding import stream
from coupler_engine_fsdp.config import FSDPConfig
from coupler_engine_fsdp.engine import FSDPEngine

EVERY_FILE = {
    "config.yaml",
    "coupler.log",
    "run.json",
    "metrics.jsonl",
    "samples",
    "tensorboard",
    "trackers",
    "reward.png",
    "checkpoints",
    "export",
}
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of GRPO as it comes: KL in the loss, one optimizer step per batch,
    synchronous.
    """
    return run("train", model, tmp_path_factory.mktemp("trained") / "run")


def tokens() -> Tensor:
    return torch.from_numpy(stream(0, "tokens").integers(4, 250, NUM_TOKENS))


def logprobs(folder: Path) -> Tensor:
    """Of :func:`tokens` but the first, as transformers computes them."""
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder).float()(tokens()[None]).logits[0]
    return logits.log_softmax(-1)[:-1].gather(-1, tokens()[1:, None])[:, 0]


def engine_logprobs(model: Path, checkpoint: Path) -> Tensor:
    """The same of an engine that read ``checkpoint``."""
    engine = FSDPEngine(FSDPConfig(), Model(str(model)))
    engine.setup(Rank())
    engine.load(checkpoint, frozenset({Part.PARAMS}))
    columns = {
        "tokens": tokens().int().numpy(),
        "loss_mask": (torch.arange(NUM_TOKENS) > 0).numpy(),
    }
    batch = Batch(
        torch.tensor([NUM_TOKENS]).numpy(), columns, {"temperature": torch.ones(1).numpy()}
    )
    return torch.from_numpy(engine.forward(batch, (Output("logprobs"),))["logprobs"][1:])


def test_the_run_folder(trained: Path, model: Path) -> None:
    assert {path.name for path in trained.iterdir()} == EVERY_FILE
    assert [line["step"] for line in metrics(trained)] == [0, 1, 2, 3]
    given = arguments("train", model, trained.parent, trained)[1:]
    plugins = Plugins.load()
    assert (
        compose(plugins, [], str(trained / "config.yaml")).config == compose(plugins, given).config
    )


def test_the_checkpoint_holds_what_its_manifest_says(trained: Path) -> None:
    (folder,) = (trained / "checkpoints").iterdir()
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    assert (folder.name, manifest["step"], manifest["parts"]) == (
        "step_3",
        3,
        ["optimizer", "params"],
    )
    written = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert manifest["files"].keys() == written - {"MANIFEST.json"}
    for name, entry in manifest["files"].items():
        assert entry["sha256"] == [hashlib.sha256((folder / name).read_bytes()).hexdigest()]


def test_every_start_says_what_it_was_made_of(
    trained: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The data and the configuration as the checkpoint has them; other ones show."""
    (start,) = json.loads((trained / "run.json").read_text())
    manifest = json.loads((trained / "checkpoints" / "step_3" / "MANIFEST.json").read_text())
    assert {name: start[name] for name in ("data", "config", "packages")} == {
        name: manifest[name] for name in ("data", "config", "packages")
    }
    monkeypatch.setattr(
        "coupler.run.tested.version",
        lambda name: "99" if name == "transformers" else version(name),
    )
    (other,) = json.loads(
        (run("train", model, tmp_path / "run", "data.limit=4", "steps=1") / "run.json").read_text()
    )
    assert other["data"] != start["data"] and other["config"] != start["config"]
    plan = start["plan"]
    assert (plan["sequences_per_step"], plan["num_shards"], plan["max_micro_batches"]) == (8, 1, 3)
    assert [worker["name"] for worker in plan["workers"]] == ["policy", "reference", "rollout"]
    (warned,) = [line for line in capsys.readouterr().err.splitlines() if "tested with" in line]
    assert (
        warned.startswith("coupler: warning: transformers 99 is outside the range ")
        and "fsdp (" in warned
    )


def test_tensorboard_shows_the_same_numbers(trained: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained / "tensorboard"))
    events.Reload()
    for name in ("reward/mean", "loss", "sync/probe"):
        shown = {event.step: event.value for event in events.Scalars(name)}
        assert shown == pytest.approx(
            {line["step"]: line[name] for line in metrics(trained) if name in line}, rel=1e-6
        )


def test_the_export_is_the_trained_model(trained: Path, model: Path) -> None:
    exported = logprobs(trained / "export")
    assert (
        exported - engine_logprobs(model, trained / "checkpoints" / "step_3" / "policy")
    ).abs().max() < 1e-4
    assert (exported - logprobs(model)).abs().mean() > 0.1
    text = "what is 1 + 2 ?"
    here, there = (AutoTokenizer.from_pretrained(folder) for folder in (trained / "export", model))
    assert here.encode(text) == there.encode(text) and here.chat_template == there.chat_template


def test_what_training_reports(trained: Path) -> None:
    start, *steps = metrics(trained)
    assert start["sync/probe"] < 1e-5 < 0.1 < start["sync/probe_permuted"]
    assert [line["kl_ref"] > 0 for line in steps] == [
        False,
        True,
        True,
    ]  # the reference stays where the policy began
    for line in steps:
        assert line["train_infer/abs_diff"] < 1e-5 < line["train/grad_norm"]
        assert line["loss"] == pytest.approx(line["policy_loss"] + 0.04 * line["kl_ref"], abs=1e-6)
        assert line["staleness/max"] == 0 and line["batch/sequences"] == 8


@pytest.mark.parametrize("overrides", [(), ("sync.transport=disk",), ("offload=true",)])
def test_the_same_seed_gives_the_same_numbers(
    trained: Path, model: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    assert reproducible(run("train", model, tmp_path / "run", *overrides)) == reproducible(trained)


def test_another_seed_gives_others(trained: Path, model: Path, tmp_path: Path) -> None:
    other = reproducible(run("train", model, tmp_path / "run", "seed=1", "steps=1"))
    assert other[1]["reward/mean"] != reproducible(trained)[1]["reward/mean"]


def test_kl_in_the_reward(model: Path, tmp_path: Path) -> None:
    """Where the policy is the reference the penalty is zero, whatever its coefficient;
    a step later it is not.
    """
    options = ("algorithm=grpo", "algorithm.kl=in_reward", "steps=2")
    weak, strong = (
        reproducible(
            run("train", model, tmp_path / str(coef) / "run", *options, f"algorithm.kl_coef={coef}")
        )
        for coef in (0.04, 4)
    )
    assert weak[1] == strong[1] and weak[2]["kl_ref"] == strong[2]["kl_ref"] > 0
    assert weak[2]["loss"] == weak[2]["policy_loss"]
    assert weak[2]["train/grad_norm"] != strong[2]["train/grad_norm"]


def test_with_lora_the_policy_is_its_own_reference(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run("train", model, tmp_path / "run", "engine.lora_rank=4", "engine.lr=3e-2")
    assert "reference" not in capsys.readouterr().out
    assert [line["kl_ref"] > 0 for line in metrics(folder)[1:]] == [False, True, True]
    assert all(line["train_infer/abs_diff"] < 1e-5 for line in metrics(folder)[1:])
    assert (logprobs(folder / "export") - logprobs(model)).abs().mean() > 0.1


def test_several_optimizer_steps_evaluations_and_checkpoints(model: Path, tmp_path: Path) -> None:
    folder = run(
        "train", model, tmp_path / "run", "algorithm=rloo", "steps=3",
        "optimizer_steps_per_batch=2", "engine.lr=1e-3",
        f"eval.data.source={tmp_path / 'rows.jsonl'}", "eval.data.max_prompt_tokens=64",
        "eval.every_steps=2",
        "eval.at_start=true", "checkpoint.every_steps=1", "checkpoint.contents=[model,extra]",
        "checkpoint.export=false",
    )  # fmt: skip
    _, *steps = metrics(folder)
    for line in steps:
        assert abs(line["ratio_mean"] - 1) > 1e-3 and line["train_infer/abs_diff"] < 1e-5
    evaluated = [line["step"] for line in metrics(folder) if 0 <= line.get("eval/reward", -1) < 2]
    assert evaluated == [0, 2, 3], "the last step is, whether it is due or not"
    samples = {f"eval_{step}.jsonl" for step in evaluated}
    assert {path.name for path in folder.iterdir()} == (EVERY_FILE - {"export"}) | samples
    for step in (2, 3):
        manifest = json.loads(
            (folder / "checkpoints" / f"step_{step}" / "MANIFEST.json").read_text()
        )
        assert (manifest["step"], manifest["parts"]) == (step, ["params"])


def test_staleness_is_bounded(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asynchronous = ("max_staleness=1", "algorithm.behaviour=rollout", "steps=4")
    _, *steps = metrics(run("train", model, tmp_path / "run", *asynchronous))
    assert steps[0]["staleness/max"] == 0
    assert max(line["staleness/max"] for line in steps) == 1
    assert sum(line["staleness/violations"] for line in steps) == 0
    shown = capfd.readouterr().err
    assert "Traceback" not in shown and "Task was destroyed" not in shown


def test_a_sync_is_judged_by_no_token_on_an_old_cache(model: Path, tmp_path: Path) -> None:
    """A step samples for longer than it trains, so that there are some as a rule. Their
    log-probs are 0.05 apart.
    """
    folder = run(
        "train", model, tmp_path / "run", "max_staleness=1", "algorithm.behaviour=rollout",
        "sync.in_flight=stale_kv", "rollout.max_sequences=3", "sampling.max_tokens=96",
        "engine.lr=2e-3", "steps=3", "prompts_per_step=4",
    )  # fmt: skip
    for line in metrics(folder)[1:]:
        assert line.get("sync/probe", line["train_infer/abs_diff"]) < 1e-4


def test_supervised_training_lowers_the_loss(model: Path, tmp_path: Path) -> None:
    options = ("engine.lr=3e-3", "prompts_per_step=6", "optimizer_steps_per_batch=2")
    folder = run("sft", model, tmp_path / "run", *options)
    losses = [line["nll"] for line in metrics(folder)]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2]
    assert {path.name for path in folder.iterdir()} == EVERY_FILE - {"samples"}
    exported = logprobs(folder / "export")
    assert (
        exported - engine_logprobs(model, folder / "checkpoints" / "step_3" / "policy")
    ).abs().max() < 1e-4
    assert (exported - logprobs(model)).abs().mean() > 0.1
    assert reproducible(run("sft", model, tmp_path / "again" / "run", *options)) == reproducible(
        folder
    )


def test_a_cut_distribution_is_the_same_in_rollout_policy_and_reference(
    trained: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engine and rollout agree as closely as without a cut, also when a recorded step
    is looked at again. The reference equals the policy at first.
    """
    cut = ("sampling.top_p=0.9", "sampling.top_k=20", "engine.lr=1e-4", "record.every_steps=1")
    folder = run("train", model, tmp_path / "run", *cut)

    for whole, masked in zip(metrics(trained)[1:], metrics(folder)[1:], strict=True):
        assert whole["train_infer/kl"] < 1e-7 > masked["train_infer/kl"]
        assert masked["train_infer/abs_diff_max"] < 1e-4
        assert 0.1 < masked["entropy"] < np.log(20)
    assert metrics(folder)[1]["kl_ref"] < 1e-7

    found = replayed(folder, 1, "logprobs", capsys)
    assert found and all(now == pytest.approx(then, rel=1e-4) for then, now, _ in found.values())


def test_evaluation_with_a_top_p_that_leaves_one_token_is_greedy(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = run("eval", model, tmp_path / "cut", "eval.temperature=1", "eval.top_p=1e-6")
    assert "top_p" not in capsys.readouterr().err
    greedy = run("eval", model, tmp_path / "greedy", "eval.temperature=0")
    assert (cut / "eval.jsonl").read_text() == (greedy / "eval.jsonl").read_text()


def test_evaluation_writes_what_it_scored(model: Path, tmp_path: Path) -> None:
    folder = run("eval", model, tmp_path / "run", "eval.samples_per_prompt=2", "eval.temperature=1")
    samples = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    assert [sample["row"] for sample in samples] == [row for row in range(6) for _ in range(2)]
    scope: dict = {}
    exec((tmp_path / "reward.py").read_text(), scope)
    rewards = [scope["score"](sample["completion"], sample["answer"]) for sample in samples]
    assert [sample["reward"] for sample in samples] == pytest.approx(rewards)
    (values,) = metrics(folder)
    assert values["eval/reward"] == pytest.approx(sum(rewards) / len(rewards))
    best = [max(pair) for pair in zip(rewards[::2], rewards[1::2], strict=True)]
    assert values["eval/best_of_2"] == pytest.approx(sum(best) / len(best))
    assert not any("majority" in name for name in values), "the reward does not say what it read"


@pytest.mark.parametrize("job", list(Job))
def test_a_folder_that_holds_a_run_is_refused(
    job: Job, trained: Path, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    before = contents(trained)
    assert main(arguments(job, model, tmp_path, trained)) == 2
    assert contents(trained) == before
    shown = capfd.readouterr().err
    assert (
        f"coupler: run_dir={trained} holds a run " in shown
        and "; nothing in it was touched" in shown
    )
    advice = (
        "\n  try:  another run_dir"
        if job is Job.EVAL
        else "\n  or:   another run_dir to start anew"
    )
    assert advice in shown
    assert "Traceback" not in shown


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}
