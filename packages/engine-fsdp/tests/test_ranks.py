"""Several ranks over gloo and over NCCL: sharded sums, hybrid sharding, checkpoints at
another world size.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import WANT, arrays, closeness, info, loss, make_batch, make_engine, reference, worst

from coupler.engine_kit.lora_names import names_of
from coupler.engine_kit.rendezvous import keep_port
from coupler.engine_kit.saved import open_saved
from coupler.interfaces import EVERYTHING, Part

Folder = Callable[[str], Path]
CASES = {
    "sharded": ("qwen2", {}),
    "tied": ("qwen3", {"gradient_checkpointing": True}),
    "some-layers": ("qwen3", {"gradient_checkpointing": True, "recompute_num_layers": 1}),
    "kept-gathered": ("llama", {"reshard_after_forward": False, "sync_every_micro_batch": False}),
    "hybrid": ("qwen2", {"fsdp_size": 2}),
    "replicated": ("qwen3", {"fsdp_size": 1}),
    "experts": ("experts", {}),
    "adamw8bit": ("blocks", {"optimizer": "adamw8bit"}),
    "muon": ("qwen2", {"optimizer": "muon"}),
    "muon-hybrid": ("llama", {"optimizer": "muon", "fsdp_size": 2}),
}
BF16 = {
    "bf16": (
        "qwen3",
        {"dtype": "bf16", "gradient_checkpointing": True},
    ),  # attention by the fused kernel on a GPU
    "bf16-hybrid": ("mistral", {"dtype": "bf16", "fsdp_size": 2, "reshard_after_forward": False}),
}
# rows of A that no number of ranks here divides
LORA = {
    "lora": ("llama", {"lora_rank": 6}),
    "lora-experts": ("experts", {"lora_rank": 6, "target_modules": ["all-linear", "experts"]}),
}
FROZEN = {"lora-bf16": ("llama", {"lora_rank": 6, "dtype": "bf16"})}
SETTINGS = {"lr": 1e-2, "max_tokens_per_gpu": 40, "dtype": "fp32"}
STEPS = 2
NUM_GPUS = torch.cuda.device_count()


def spawn(
    tmp_path: Path, cases: dict[str, tuple[str, dict]], worlds: list[int], visible: dict[str, str]
) -> dict[int, list[Path]]:
    """Run every case on each number of ranks (see ranks_main.py); return the folder
    that each rank wrote.

    The first, largest world saves a checkpoint, the others load it.
    """
    runs = {world: [tmp_path / f"world-{world}-rank-{i}" for i in range(world)] for world in worlds}
    jobs, ports = [], ExitStack()
    for world, outs in runs.items():
        port, kept = keep_port("127.0.0.1")
        ports.enter_context(kept)
        rendezvous = f"127.0.0.1:{port}"
        saved = {"save" if world == worlds[0] else "load": str(tmp_path / "checkpoint")}
        jobs.append(
            {"rendezvous": rendezvous, "outs": [str(out) for out in outs], "cases": cases, **saved}
        )
    launcher = Path(__file__).with_name("ranks_main.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **visible}
    with ports:
        done = subprocess.run(
            [sys.executable, str(launcher), json.dumps(jobs)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=1200,
        )
    assert done.returncode == 0, done.stderr[-6000:]
    return runs


def loaded(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


@pytest.fixture(
    scope="module",
    params=[
        "gloo",
        pytest.param(
            "nccl", marks=[pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS < 2, reason="no 2 GPUs")]
        ),
    ],
)
def runs(
    request: pytest.FixtureRequest, folder_of: Folder, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[Path]]:
    """What 4 and 2 ranks wrote; 4 ranks saved a checkpoint that 2 ranks loaded. On 2
    GPUs, 2 ranks saved it.
    """
    cases = {
        name: (str(folder_of(model)), settings)
        for name, (model, settings) in (CASES | BF16 | LORA | FROZEN).items()
    }
    on_gpus = request.param == "nccl"
    worlds = [world for world in (4, 2) if not on_gpus or world <= NUM_GPUS]
    return spawn(
        tmp_path_factory.mktemp("ranks"),
        cases,
        worlds,
        {} if on_gpus else {"CUDA_VISIBLE_DEVICES": ""},
    )


def of_world(runs: dict[int, list[Path]], world: int) -> list[Path]:
    if world not in runs:
        pytest.skip(f"{world} ranks need {world} GPUs, this machine has {NUM_GPUS}")
    return runs[world]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_ranks_sum_to_the_gradient_of_plain_transformers(
    runs, folder_of: Folder, world: int, case: str
) -> None:
    """Rank 0 has no sequence at all; the others differ in micro-batches."""
    want = reference(folder_of(CASES[case][0]))[1]
    for rank, out in enumerate(of_world(runs, world)):
        assert worst(loaded(out / f"{case}-grads.npz"), want) < 1e-5, f"rank {rank}"


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", LORA)
def test_every_rank_sends_the_whole_adapter(runs, folder_of: Folder, world: int, case: str) -> None:
    """With the weights of the folder it is the sum that other rollouts get."""
    base = arrays(make_engine(folder_of(LORA[case][0]), dtype="fp32").weights())
    for out in of_world(runs, world):
        adapter, merged = loaded(out / f"{case}-adapter.npz"), loaded(out / f"{case}-weights.npz")
        assert len(adapter) == 2 * sum("_proj.weight" in name for name in base)
        for name, tensor in base.items():
            a, b = names_of(name)
            update = adapter[b] @ adapter[a] if a in adapter else 0.0
            np.testing.assert_allclose(tensor + update, merged[name], atol=1e-6, err_msg=name)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", BF16)
def test_ranks_in_bf16_are_near_plain_transformers(
    runs, folder_of: Folder, world: int, case: str
) -> None:
    """Shards are reduced in fp32, so that ranks are no further off than transformers'
    own bf16 is.
    """
    folder = folder_of(BF16[case][0])
    want, plain = reference(folder)[1], reference(folder, dtype=torch.bfloat16)[1]
    first, *others = [loaded(out / f"{case}-grads.npz") for out in of_world(runs, world)]
    assert closeness(first, want) > closeness(plain, want) > 0.95
    for other in others:
        assert worst(other, first) == 0


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", CASES | LORA)
def test_ranks_step_as_one(runs, folder_of: Folder, world: int, case: str) -> None:
    """Norms, clipping and AdamW on shards; a non-finite gradient on one rank is applied
    on none.
    """
    model, settings = (CASES | LORA)[case]
    one = make_engine(folder_of(model), **{**SETTINGS, **settings, "fsdp_size": 0})
    want = []
    for index in range(STEPS):
        batch = make_batch(seed=index)
        one.forward_backward(batch, WANT, loss, info(batch, index))
        want.append(one.step())
    weights = arrays(one.weights())
    for out in of_world(runs, world):
        steps = json.loads((out / f"{case}.json").read_text())["steps"]
        assert [s[0] for s in steps] == [True, True, False]
        assert [s[1] for s in steps[:2]] == pytest.approx([s.grad_norm for s in want], rel=1e-4)
        got = loaded(out / f"{case}-weights.npz")
        assert list(got) == list(weights)
        for name, tensor in weights.items():
            # a tenth of lr: Adam divides by tiny gradients, and Muon by none
            near = 1e-5 if name in one.matrices else 1e-3
            np.testing.assert_allclose(got[name], tensor, atol=near, err_msg=name)


def test_weights_that_stay_gathered_cross_once_a_step(runs) -> None:
    """However many micro-batches a step has. Other weights cross for each pass."""
    for out in (out for outs in runs.values() for out in outs):
        kept, sharded = (
            json.loads((out / f"{case}.json").read_text()) for case in ("kept-gathered", "sharded")
        )
        assert [step[2] for step in kept["steps"][:STEPS]] == [kept["modules"]] * STEPS
        assert all(step[2] > 2 * sharded["modules"] for step in sharded["steps"][:STEPS])


def test_every_rank_refuses_a_sequence_that_is_too_long_for_one(runs) -> None:
    for outs in runs.values():
        for out in outs:
            assert (
                "engine.max_tokens_per_gpu"
                in json.loads((out / "sharded.json").read_text())["too_long"]
            )


def test_forward_on_ranks_equals_plain_transformers(runs, folder_of: Folder) -> None:
    want = reference(folder_of("qwen2"))[0]["logprobs"]
    for world, outs in runs.items():
        parts = make_batch().with_tokens(want=want)
        shards = [parts.take(rows) for rows in ([], *parts.partition(world - 1))]
        for out, shard in zip(outs, shards, strict=True):
            np.testing.assert_allclose(
                loaded(out / "sharded-outputs.npz")["logprobs"], shard["want"], atol=2e-5
            )


def test_an_engine_of_one_rank_lives_inside_a_larger_group(runs, folder_of: Folder) -> None:
    want = reference(folder_of("qwen2"))[0]["logprobs"]
    for outs in runs.values():
        for out in outs:
            np.testing.assert_allclose(
                loaded(out / "alone-outputs.npz")["logprobs"], want, atol=2e-5
            )


def test_memory_that_moves_off_the_device_and_back_changes_nothing(runs) -> None:
    """Parameters, gradients and optimizer, between all phases of a step."""
    for outs in runs.values():
        for out in outs:
            still, moved = loaded(out / "still-weights.npz"), loaded(out / "moved-weights.npz")
            assert worst(moved, still) == 0


def test_a_checkpoint_continues_on_fewer_ranks_and_on_one(runs, folder_of: Folder) -> None:
    saved = runs[max(runs)][0].parent / "checkpoint"
    want = loaded(runs[max(runs)][0] / "continued-weights.npz")
    for out in runs[2]:
        for name, tensor in loaded(out / "continued-weights.npz").items():
            np.testing.assert_allclose(tensor, want[name], atol=2e-4, err_msg=name)
    alone = make_engine(folder_of("qwen2"), **SETTINGS)
    alone.load(saved, EVERYTHING)
    batch = make_batch(seed=7)
    alone.forward_backward(batch, WANT, loss, info(batch))
    alone.step()
    for name, tensor in arrays(alone.weights()).items():
        np.testing.assert_allclose(tensor, want[name], atol=2e-4, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_one_rank_reads_exactly_what_four_wrote(runs, folder_of: Folder, case: str) -> None:
    alone = make_engine(folder_of(CASES[case][0]), dtype="fp32")
    alone.load(of_world(runs, 4)[0].parent / f"checkpoint-{case}", frozenset({Part.PARAMS}))
    want = loaded(of_world(runs, 4)[0] / f"{case}-weights.npz")
    for name, tensor in arrays(alone.weights()).items():
        np.testing.assert_array_equal(tensor, want[name], err_msg=name)


def test_one_rank_reads_the_codes_that_four_wrote(runs, folder_of: Folder) -> None:
    """Blocks are the same on any number of ranks, so that nothing is quantised anew."""
    saved = of_world(runs, 4)[0].parent / "checkpoint-adamw8bit"
    alone = make_engine(folder_of("blocks"), dtype="fp32", optimizer="adamw8bit")
    alone.load(saved, EVERYTHING)
    assert alone._optimizer.num_steps == STEPS
    with open_saved(saved) as whole:
        for name, moment in alone._optimizer.moments_of().items():
            weight, _, key = name.rpartition("/")
            if weight in alone.blocks and key != "step":
                assert torch.equal(moment.dequantize(), whole.tensor(key, weight)), name


def test_the_rendezvous_listens_on_loopback_alone(runs) -> None:
    for outs in runs.values():
        assert json.loads((outs[0] / "port.json").read_text()) == ["0100007F"]


def test_replicas_write_one_copy(runs) -> None:
    names = sorted(
        path.name for path in (of_world(runs, 4)[0].parent / "checkpoint-hybrid").iterdir()
    )
    assert names == [
        "index.json",
        "shard-00000-of-00002.safetensors",
        "shard-00001-of-00002.safetensors",
    ]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_hold_fp32_masters_of_what_trains_alone(runs, folder_of: Folder, world: int) -> None:
    reports = [json.loads((out / "lora-bf16.json").read_text()) for out in of_world(runs, world)]
    engine = make_engine(folder_of(FROZEN["lora-bf16"][0]), lora_rank=6)
    adapter = sum(p.numel() for p in engine.adapter.parameters().values())
    frozen = sum(t.numel() for t in engine.named.values())
    held = {
        n: sum(r["bytes"].get(f"torch.{n}", 0) for r in reports) for n in ("bfloat16", "float32")
    }
    assert held == {"bfloat16": 2 * frozen, "float32": 4 * adapter}


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_hold_a_reference_in_two_bytes(runs, folder_of: Folder, world: int) -> None:
    """Its log-probs are those of an engine with masters, which rounds each time."""
    folder = folder_of(CASES["sharded"][0])
    trained = make_engine(folder, dtype="bf16")
    outs = of_world(runs, world)
    found = [json.loads((out / "frozen-bytes.json").read_text()) for out in outs]
    assert {name for each in found for name in each} == {"torch.bfloat16"}
    count = sum(tensor.numel() for tensor in trained.named.values())
    assert sum(each["torch.bfloat16"] for each in found) == 2 * count

    rows = make_batch().partition(world - 1)
    want = trained.forward(make_batch(), WANT)["logprobs"]
    for part, out in zip(rows, outs[1:], strict=True):
        batch = make_batch().with_tokens(want=want).take(part)
        np.testing.assert_allclose(
            loaded(out / "frozen-outputs.npz")["logprobs"], batch["want"], atol=0.1
        )
