"""``coupler train engine=fsdp rollout=vllm``, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coupler.cli import main
from coupler.testing.models import read_tensors
from coupler.testing.reference import TransformersReference
from coupler_rollout_vllm.compat import engine

REWARD = """
def score(completion, answer):
    return len(set(completion)) / (1 + len(completion)) + (answer in completion)
"""


def arguments(folder: Path, reference: TransformersReference, *overrides: str) -> list[str]:
    """Write data and reward into ``folder``; return what ``coupler`` is called with."""
    rows = [{"prompt": f"what is {i} + 2 ?", "answer": str(i + 2)} for i in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return [
        "train",
        "engine=fsdp",
        "rollout=vllm",
        "algorithm=grpo",
        f"model.path={reference.folder}",
        f"run_dir={folder / 'run'}",
        f"data.source={folder / 'rows.jsonl'}",
        "data.max_prompt_tokens=64",
        f"reward.target={folder / 'reward.py'}:score",
        "engine.dtype=fp32",
        "engine.lr=1e-2",
        "engine.max_tokens_per_gpu=256",
        "rollout.dtype=fp32",
        "sampling.max_tokens=8",
        "samples_per_prompt=4",
        "prompts_per_step=2",
        "steps=3",
        "strict=true",
        "trackers=[console,jsonl]",
        *overrides,
    ]


def logged(folder: Path) -> list[dict[str, float]]:
    return [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]


def run(folder: Path, reference: TransformersReference, *overrides: str) -> list[dict[str, float]]:
    assert main(arguments(folder, reference, *overrides)) == 0
    return logged(folder)


# With a larger rate all tokens of this model but one are soon cut off.
MASKED = ("sampling.top_p=0.9", "sampling.top_k=20", "engine.lr=1e-4")


@pytest.mark.parametrize(
    "overrides",
    [
        # nccl: over gloo, on the CPU
        ("max_staleness=1", "algorithm.correction_cap=2", "sync.transport=nccl"),
        pytest.param(("engine.lora_rank=4", "sync.transport=tcp", *MASKED), marks=pytest.mark.slow),
        ("engine.lora_rank=4", "rollout.max_lora_rank=4", "sync.transport=disk", "offload=true"),
    ],
    ids=[
        "asynchronous",
        "with the adapter merged and sampling masks",
        "with the adapter apart, taking turns",
    ],
)
def test_it_trains(
    tmp_path: Path, reference: TransformersReference, overrides: tuple[str, ...]
) -> None:
    log = run(tmp_path, reference, *overrides)
    assert len(log) == 4
    assert log[0]["sync/probe"] < 1e-3 < 1e-2 < log[0]["sync/probe_permuted"]
    for step in log[1:]:
        # a batch older than the last sync judges nothing, so that the sync is probed
        older = "max_staleness=1" in overrides and "train_infer/abs_diff" not in step
        assert step["sync/probe" if older else "train_infer/abs_diff"] < 1e-3
        assert step["train/grad_norm"] > 0


@pytest.mark.slow
def test_another_rollout_samples_the_evaluations(
    tmp_path: Path, reference: TransformersReference
) -> None:
    """Training with transformers, evaluation with vLLM, in one run."""
    held_out = (f"eval.data.source={tmp_path / 'rows.jsonl'}", "eval.data.max_prompt_tokens=64")
    log = run(
        tmp_path, reference, "rollout=hf", "eval.rollout=vllm", "eval.rollout.dtype=fp32",
        "eval.every_steps=2", *held_out,
    )  # fmt: skip

    evaluated = [step for step in log if "eval/reward" in step]
    assert len(evaluated) == 2
    assert evaluated[0]["eval/sync/probe_permuted"] > 1e-2
    assert max(step["eval/sync/probe"] for step in evaluated) < 1e-3
    assert max(step["train_infer/abs_diff"] for step in log[1:]) < 1e-3


@pytest.mark.slow
def test_a_quantised_rollout_is_held_to_the_limit_of_its_precision(
    tmp_path: Path, reference: TransformersReference
) -> None:
    log = run(tmp_path, reference, "rollout.dtype=bf16", "rollout.quantization=fp8")
    assert log[0]["sync/probe"] < 0.3 < 1 < log[0]["sync/probe_permuted"]
    for step in log[1:]:
        assert 1e-3 < step["train_infer/abs_diff"] < 0.3


ADAPTED = ("engine.lora_rank=4", "engine.lora_alpha=8", "rollout.max_lora_rank=4")
ASYNCHRONOUS = ("max_staleness=1", "algorithm.correction_cap=2")


@pytest.fixture(scope="module")
def adapted(
    tmp_path_factory: pytest.TempPathFactory, reference: TransformersReference
) -> tuple[Path, list[dict[str, float]]]:
    """The folder of a run of three steps that trains an adapter, and its log."""
    folder = tmp_path_factory.mktemp("adapted")
    return folder, run(folder, reference, *ADAPTED, *ASYNCHRONOUS)


def judged(step: dict[str, float]) -> float:
    """The distance of a step's log-probs, or of its probe where nothing was sampled by
    the weights that it trained.
    """
    return step["train_infer/abs_diff"] if "train_infer/abs_diff" in step else step["sync/probe"]


def test_an_adapter_travels_alone(
    adapted: tuple[Path, list[dict[str, float]]], reference: TransformersReference
) -> None:
    """After the start a sync carries A and B, the rollout follows the policy, and what
    is exported is their sum.
    """
    folder, log = adapted
    assert "(lora) -> vllm" in (folder / "run" / "coupler.log").read_text()
    assert (
        log[0]["sync/probe"]
        < 1e-3
        < 1e-2
        < min(log[0]["sync/probe_permuted"], log[0]["sync/probe_adapter"])
    )
    weights = sum(tensor.nbytes for tensor in reference.tensors.values())
    for step in log[1:]:
        # of seven linear maps in each of two layers
        assert step["sync/tensors"] == 2 * 7 * 2
        assert step["sync/bytes"] < weights / 5
        assert judged(step) < 1e-3
        assert step["train/grad_norm"] > 0

    exported = read_tensors(folder / "run" / "export")
    assert exported.keys() == reference.tensors.keys()
    moved = {
        name
        for name, tensor in exported.items()
        if not np.array_equal(tensor, reference.tensors[name])
    }
    assert moved == {name for name in exported if "_proj.weight" in name}


def test_it_goes_on_with_the_adapter_of_a_checkpoint(
    adapted: tuple[Path, list[dict[str, float]]], reference: TransformersReference
) -> None:
    """The first push after a resume brings the weights and an adapter that is not 0 any
    more.
    """
    log = run(adapted[0], reference, *ADAPTED, *ASYNCHRONOUS, "steps=4")
    assert [line["step"] for line in log] == [0, 1, 2, 3, 4]
    assert judged(log[4]) < 1e-3


@pytest.mark.slow
def test_requests_that_forget_the_adapter_are_found_before_the_first_step(
    tmp_path: Path,
    reference: TransformersReference,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is 0 then, and every log-prob is right without it."""

    async def forgets(*arguments: object, adapted: bool, send: Any = engine.send_request) -> None:
        await send(*arguments, adapted=False)

    monkeypatch.setattr(engine, "send_request", forgets)
    assert main(arguments(tmp_path, reference, *ADAPTED)) == 2
    assert (
        "a push of a random adapter left the rollout's log-probs within" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ("engine.lora_rank=16", "rollout.max_lora_rank=8"),
            (
                "engine.lora_rank=16 is more than rollout.max_lora_rank=8 has room for: set "
                "rollout.max_lora_rank=16, or 0"
            ),
        ),
        (
            ("rollout.max_lora_rank=8",),
            (
                "rollout.max_lora_rank=8 is for an adapter, and engine=fsdp trains none: set "
                "engine.lora_rank above 0, or "
            ),
        ),
        (
            ("engine.lora_rank=600", "rollout.max_lora_rank=600"),
            ("rollout.max_lora_rank must be at most 512, got 600"),
        ),
    ],
)
def test_an_adapter_that_vllm_cannot_take_is_refused_by_the_plan(
    tmp_path: Path,
    reference: TransformersReference,
    capsys: pytest.CaptureFixture[str],
    overrides: tuple[str, ...],
    sentence: str,
) -> None:
    assert main(["plan", *arguments(tmp_path, reference, *overrides)[1:]]) == 2
    shown = capsys.readouterr().err
    assert sentence in shown and "Traceback" not in shown


def test_a_wrong_argument_of_the_engine_is_one_sentence(
    tmp_path: Path, reference: TransformersReference, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):
        run(tmp_path, reference, "rollout.extra_args.no_such_argument=3")
    printed = capsys.readouterr().err
    assert "did not start" in printed and "no_such_argument" in printed
    assert "Traceback" not in printed
