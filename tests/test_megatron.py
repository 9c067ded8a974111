"""GRPO with engine=megatron and rollout=hf from the command line: policy and reference
in one process, on the CPU.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from job_run import arguments, metrics, replayed, reproducible, run, write_inputs
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from coupler.batch import Batch
from coupler.cli import main
from coupler.config.schema import RouterReplay, RunConfig
from coupler.executors import Local
from coupler.executors.waits import Waits
from coupler.interfaces import Model, Rank
from coupler.jobs.train import column_providers
from coupler.loop.device_memory import Residency
from coupler.loop.engine_group import EngineGroup
from coupler.metrics import Metrics
from coupler.plugins.manager import Plugins
from coupler.testing.cases import make_batch
from coupler.testing.models import write_qwen3_moe
from coupler.testing.reference import TransformersReference
from coupler.testing.subject import configured
from coupler.worker.spec import WorkerSpec
from coupler_engine_megatron.config import MegatronConfig

ENGINE = (
    "engine=megatron",
    "trackers=[jsonl]",
    "deterministic=true",
    "profile.steps=[1]",
    "record.every_steps=1",
)


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run("train", model, tmp_path_factory.mktemp("megatron") / "run", *ENGINE)


def test_it_trains_and_rollouts_follow(trained: Path) -> None:
    lines = metrics(trained)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(line["train/grad_norm"] > 0 for line in lines[1:])
    assert all(line["train_infer/abs_diff"] < 1e-3 for line in lines[1:])


def test_the_export_is_the_trained_model_in_the_layout_it_came_in(
    trained: Path, model: Path
) -> None:
    exported, before = (
        load_file(folder / "model.safetensors") for folder in (trained / "export", model)
    )
    assert {n: t.shape for n, t in exported.items()} == {n: t.shape for n, t in before.items()}
    assert any(not torch.equal(exported[name], tensor) for name, tensor in before.items())
    assert AutoModelForCausalLM.from_pretrained(trained / "export").config.model_type == "qwen2"


def test_a_run_of_any_layout_is_exported_and_replayed_by_one_rank(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Checkpoints are the same for every layout; the folder says that many ranks made
    this one.
    """
    shutil.copytree(trained, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    layout = {
        "ranks": 64, "tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2,
        "context_parallel": 2,
        "expert_parallel": 2, "expert_tensor_parallel": 2, "first_stage_layers": 3,
        "last_stage_layers": 5,
    }  # fmt: skip
    values = OmegaConf.load(config)
    values.engine.update(layout)
    OmegaConf.save(OmegaConf.merge(values, {"executor": "ray"}), config)
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    exported, before = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "out", trained / "export")
    )
    assert exported.keys() == before.keys() and all(
        torch.equal(exported[name], before[name]) for name in before
    )
    assert replayed(tmp_path / "run", 1, "train", capsys)


def test_a_plan_prints_how_ranks_split_the_work(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    sizes = (
        "engine.ranks=4",
        "engine.tensor_parallel=2",
        "engine.pipeline_parallel=2",
        "executor=ray",
    )
    write_inputs(tmp_path)
    assert (
        main([*arguments("plan", model, tmp_path, tmp_path / "run"), "engine=megatron", *sizes])
        == 0
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 data shard; policy (engine megatron: tensor 2 x pipeline 2) x 4" in printed


def test_two_runs_are_equal(trained: Path, model: Path, tmp_path: Path) -> None:
    assert reproducible(run("train", model, tmp_path / "again", *ENGINE)) == reproducible(trained)


def test_a_policy_and_a_critic_go_on_with_equal_bits(model: Path, tmp_path: Path) -> None:
    """PPO in one go, and as two steps of which the second goes on: metrics, both
    exports, and `coupler export`.
    """
    ppo = (*ENGINE[:3], "algorithm=ppo", "critic.engine.lr=3e-3", "optimizer_steps_per_batch=2")
    whole, again = (tmp_path / name / "run" for name in ("whole", "again"))
    run("train", model, whole, *ppo, "steps=2")
    for steps in (1, 2):
        run("train", model, again, *ppo, f"steps={steps}")
    found, want = (
        [line | {"run/steps": 0} for line in reproducible(folder)] for folder in (again, whole)
    )
    assert found == want and want[-1]["critic/loss"] > 0 and want[-1]["critic/values"] != 0
    assert main(["export", str(again), "--out", str(tmp_path / "exported")]) == 0
    folders = [again / "export", again / "export_critic", tmp_path / "exported"]
    for folder, same in zip(
        folders, (whole / "export", whole / "export_critic", whole / "export"), strict=True
    ):
        tensors, expected = (load_file(each / "model.safetensors") for each in (folder, same))
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items()), folder
    scores = AutoModelForTokenClassification.from_pretrained(again / "export_critic").score
    assert scores.weight.abs().max() > 0, "the export's critic has the head that was trained"


def test_supervised_training_is_that_of_fsdp(model: Path, tmp_path: Path) -> None:
    ours, theirs = (
        metrics(run("sft", model, tmp_path / engine / "run", f"engine={engine}", ENGINE[1]))
        for engine in ("megatron", "fsdp")
    )
    for name in ("nll", "train/grad_norm"):
        assert [line[name] for line in ours] == pytest.approx(
            [line[name] for line in theirs], rel=1e-3
        )


def test_recorded_routes_are_replayed(tmp_path: Path) -> None:
    """Two optimizer steps on a mixture of experts, sent where the pass for old
    log-probs sent the tokens.
    """
    reference = TransformersReference(write_qwen3_moe(tmp_path / "model"))
    plugins = Plugins.load()
    algorithm = plugins.get("algorithm", "grpo")
    engine = MegatronConfig(lr=1e-2, max_tokens_per_gpu=28)
    trained = (algorithm.target, configured(algorithm.config, {"kl": "none"}))
    spec = WorkerSpec(
        "policy",
        plugins.get("engine", "megatron").target,
        engine,
        Model(str(reference.folder)),
        trained,
    )
    policy = EngineGroup(Local(inline=True, waits=Waits(60.0, 60.0)), spec, [Rank()])

    async def go() -> tuple[Batch, Metrics]:
        await policy.setup()
        config = RunConfig(optimizer_steps_per_batch=2, router_replay=RouterReplay.R2)
        residency = Residency({}, shared=False)
        batch = make_batch(reference)
        batch = batch.with_tokens(
            **await column_providers(config, policy, None, None, residency)["old_logprobs"](batch)
        )
        return batch, (await policy.train(batch, 2, None)).metrics

    batch, metrics = asyncio.run(go())
    np.testing.assert_array_equal(
        np.sort(batch["routed_experts"], 2), np.sort(reference.routes(batch), 2)
    )
    np.testing.assert_allclose(
        batch["old_logprobs"], reference.outputs(batch)["logprobs"], atol=1e-4
    )
    moved = metrics["moe/route_disagreement"]
    assert 0 < moved.value < 0.5, (
        "the second step's weights choose others now and then; the first one's do not"
    )
    assert 1 <= metrics["moe/max_load"].value <= 4


@pytest.fixture
def routed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Path]:
    """The command line of a job whose rollout sends some tokens to other experts than
    the routers would; its folder.
    """
    monkeypatch.setenv("COUPLER_PLUGINS", "routing_rollout")
    experts, folder = write_qwen3_moe(tmp_path / "experts"), tmp_path / "run"
    write_inputs(tmp_path)
    plain = [
        each
        for each in arguments("train", experts, tmp_path, folder)
        if not each.startswith(("rollout", "engine"))
    ]
    return [
        *plain,
        *ENGINE[:2],
        "rollout=routing",
        "sync.self_test=false",
        "steps=1",
        "engine.dtype=fp32",
    ], folder


def test_routes_of_the_rollout_are_replayed(
    routed: tuple[list[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Engine and rollout then have equal log-probs. Without, and where one route is
    missing, the run ends.
    """
    job, folder = routed
    assert main([*job, "router_replay=R3"]) == 0
    step = metrics(folder)[-1]
    assert step["train_infer/abs_diff"] < 1e-4 and step["train/grad_norm"] > 0
    assert 0.2 < step["moe/route_disagreement"] < 0.3, "a fourth of the tokens"
    refused = {
        ("router_replay=disabled",): "the rollouts' log-probs differ from the engine's by",
        ("router_replay=R3", "rollout.silent=2"): "a rollout left out the experts of 1 of the",
    }
    for more, what in refused.items():
        capsys.readouterr()
        assert main([*job, f"run_dir={folder}-{len(more)}", *more]) == 2
        assert what in capsys.readouterr().err


def test_routes_need_someone_who_says_them(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experts = write_qwen3_moe(tmp_path / "experts")
    write_inputs(tmp_path)
    for folder, options, what in (
        (
            experts,
            ["router_replay=R3"],
            "router_replay=R3 needs rollout=hf to say which experts tokens go to",
        ),
        (
            experts,
            ["router_replay=R2"],
            "router_replay=R2 records routes in the pass for old log-probs, and there is",
        ),
        (model, ["router_replay=R2"], "router_replay=R2 needs a model with experts"),
    ):
        assert (
            main(
                [
                    *arguments("train", folder, tmp_path, tmp_path / "run"),
                    "engine=megatron",
                    *options,
                ]
            )
            == 2
        )
        assert what in capsys.readouterr().err


def test_the_profiled_step_left_a_trace_and_no_other_did(trained: Path) -> None:
    (path,) = (trained / "profile").iterdir()
    assert path.name == "policy-rank0-step1.trace.json"
    assert any(
        "mm" in event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]
    )


def test_an_adapter_is_trained_exported_and_its_own_reference(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GRPO with LoRA, from a checkpoint of engine=fsdp under the same options."""
    lora = ("engine.lora_rank=4", "engine.lr=3e-2", "algorithm.kl=in_reward")
    first = run("train", model, tmp_path / "first" / "run", *lora, "steps=1")
    capsys.readouterr()
    start = f"checkpoint.resume={first / 'checkpoints' / 'step_1'}"
    folder = run("train", model, tmp_path / "run", "engine=megatron", *lora, start)
    shown = capsys.readouterr().out
    assert "reference" not in shown and "is of another configuration: policy as it was" in shown
    lines = metrics(folder)[1:]
    assert [line["step"] for line in lines][-1] == 3
    assert all(line["train_infer/abs_diff"] < 1e-5 for line in lines)
    assert all(line["kl_ref"] > 0 for line in lines), "what fsdp trained is there"

    adapter = load_file(folder / "export" / "adapter" / "adapter_model.safetensors")
    base, merged = (load_file(path / "model.safetensors") for path in (model, folder / "export"))
    for name, tensor in merged.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        update = 0.0
        if f"{stem}.lora_A.weight" in adapter:
            update = adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"]
        torch.testing.assert_close(tensor, base[name] + update, atol=1e-6, rtol=0)
