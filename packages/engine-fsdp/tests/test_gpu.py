"""One GPU: fused attention, mixed precision, memory that comes back. Skipped without
one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    CONFIGS,
    WANT,
    arrays,
    closeness,
    info,
    loss,
    make_batch,
    make_engine,
    reference,
    worst,
)
from torch import nn

from coupler.interfaces import EVERYTHING, Part, Rank
from coupler.testing.memory import peak_bytes
from coupler_engine_fsdp import attention, attention_cudnn, moments
from coupler_engine_fsdp.adamw8bit import block_of
from coupler_engine_fsdp.config import FSDPConfig, OptimizerName
from coupler_engine_fsdp.moments import Moments
from coupler_engine_fsdp.packing import pack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
Folder = Callable[[str], Path]


@pytest.mark.parametrize("name", CONFIGS)
def test_fp32_equals_plain_transformers(folder_of: Folder, name: str) -> None:
    batch = make_batch()
    outputs, grads = reference(folder_of(name))
    engine = make_engine(folder_of(name), dtype="fp32", max_tokens_per_gpu=64)
    np.testing.assert_allclose(
        engine.forward(batch, WANT)["logprobs"], outputs["logprobs"], atol=5e-5
    )
    engine.forward_backward(batch, WANT, loss, info(batch))
    assert worst(arrays(engine.gradients()), grads) < 5e-5


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "name", ["qwen3", "wide", "mistral"]
)  # by the fused kernels; its heads are too narrow
def test_bf16_through_fused_attention_is_near_fp32(
    folder_of: Folder, name: str, checkpointing: bool, compiled: bool
) -> None:
    batch = make_batch()
    outputs, grads = reference(folder_of(name))
    engine = make_engine(
        folder_of(name),
        max_tokens_per_gpu=64,
        gradient_checkpointing=checkpointing,
        compile=compiled,
    )
    assert np.abs(engine.forward(batch, WANT)["logprobs"] - outputs["logprobs"]).mean() < 0.05
    engine.forward_backward(batch, WANT, loss, info(batch))
    got = arrays(engine.gradients())
    assert closeness(got, grads) > 0.98
    assert {tensor.dtype for _, tensor in engine.weights()} == {torch.bfloat16}


KERNELS = {  # what attention._fused takes, of what is installed
    "flash-4": {"FLASH_4": True},
    "flash-2": {"FLASH_4": False, "FLASH_2": True},
    "torch": {"FLASH_4": False, "FLASH_2": False},
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_shared_prompts_by_every_kernel_are_near_fp32(
    folder_of: Folder,
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
    compiled: bool,
    checkpointing: bool,
) -> None:
    """Keys of a shared prompt are gathered, and so are not contiguous; a compiled layer
    asks about strides.
    """
    for name, chosen in KERNELS[kernel].items():
        if chosen and not getattr(attention, name):
            pytest.skip(f"{kernel} is not installed, or not for this GPU")
        monkeypatch.setattr(attention, name, chosen)
    torch._dynamo.reset()
    batch = make_batch().take([0, 1, 2])
    assert pack(batch, torch.device("cuda")).packing.keys is not None, "no prompt is shared"
    plain = make_engine(folder_of("wide"), dtype="fp32")
    settings = {"compile": compiled, "gradient_checkpointing": checkpointing}
    engine = make_engine(folder_of("wide"), **settings)
    outputs = [one.forward(batch, WANT)["logprobs"] for one in (engine, plain)]
    assert np.abs(outputs[0] - outputs[1]).mean() < 0.05
    for one in (engine, plain):
        one.forward_backward(batch, WANT, loss, info(batch))
    assert closeness(arrays(engine.gradients()), arrays(plain.gradients())) > 0.98


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_long_sequences_by_cudnn_are_near_fp32(
    folder_of: Folder, monkeypatch: pytest.MonkeyPatch, compiled: bool, checkpointing: bool
) -> None:
    """Each sequence has a call of its own, as long ones have."""
    if not attention_cudnn.CUDNN:
        pytest.skip("cuDNN's attention is not taken on this GPU")
    calls: list[int] = []

    def counted(*args: Any) -> Any:
        calls.append(len(args[3].pieces))
        return attention_cudnn.by_sequence(*args)

    monkeypatch.setattr(attention, "LONG", 1)
    monkeypatch.setattr(attention, "FLASH_4", False)
    monkeypatch.setattr(attention, "by_sequence", counted)
    torch._dynamo.reset()
    batch = make_batch().take([2, 3, 4, 5])
    plain = make_engine(folder_of("wide"), dtype="fp32")
    settings = {"compile": compiled, "gradient_checkpointing": checkpointing}
    engine = make_engine(folder_of("wide"), **settings)

    outputs = [one.forward(batch, WANT)["logprobs"] for one in (engine, plain)]
    for one in (engine, plain):
        one.forward_backward(batch, WANT, loss, info(batch))

    assert np.abs(outputs[0] - outputs[1]).mean() < 0.05
    assert closeness(arrays(engine.gradients()), arrays(plain.gradients())) > 0.98
    assert 4 in calls, "another kernel ran"


def test_layers_compile_once_for_all_lengths(folder_of: Folder) -> None:
    """Every batch has another number of tokens and sequences, another longest one. One
    of two graphs shares prompts.
    """
    torch._dynamo.reset()
    engine = make_engine(folder_of("qwen3"), compile=True)
    graphs: list[int] = []
    for seed in range(4):
        batch = make_batch(5 + seed, seed)
        engine.forward(batch, WANT)
        engine.forward_backward(batch, WANT, loss, info(batch))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert len(set(graphs[1:])) == 1


def test_bf16_steps_equal_adamw(folder_of: Folder) -> None:
    """Clipping, AdamW and the bf16 copies in one pass, on gradients of one micro-batch
    and of several.
    """
    settings = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5, "sync_dtype": "fp32"}
    engine = make_engine(folder_of("qwen3"), **settings)
    want = {
        name: torch.from_numpy(w).double().requires_grad_()
        for name, w in arrays(engine.weights()).items()
    }
    groups = [
        {"params": [w for w in want.values() if (w.ndim > 1) == wide], "weight_decay": wide * 0.1}
        for wide in (1, 0)
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2)
    start = {name: w.detach().clone() for name, w in want.items()}
    for index in range(3):
        batch = make_batch(seed=index)
        engine.config.max_tokens_per_gpu = 64 if index else 1000
        engine.forward_backward(batch, WANT, loss, info(batch, index))
        if index == 1:
            engine._norm.fill_(torch.nan)
            assert not engine.step().applied
            continue
        for name, grad in arrays(engine.gradients()).items() if index else ():
            want[name].grad = torch.from_numpy(grad).double()
        if not index:  # not looked at before the step: it is still with the copies
            for name, tensor in engine.named.items():
                want[name].grad = engine.masters.gradient_of(tensor).double().cpu()
        norm = float(torch.nn.utils.clip_grad_norm_(want.values(), 0.5))
        assert norm > 0.5
        assert engine.step().grad_norm == pytest.approx(norm, rel=1e-4)
        adamw.step()
    for name, got in arrays(engine.weights()).items():
        moved = float((want[name] - start[name]).abs().max())
        assert np.abs(got - want[name].detach().numpy()).max() < 1e-3 * moved, name
    assert all(
        torch.equal(pair.copy, pair.master.bfloat16()) for pair in engine.masters.pairs.values()
    )


def test_offload_of_gradients_alone(folder_of: Folder) -> None:
    """As core does before the rollout wakes."""
    batch = make_batch()
    engine = make_engine(folder_of("qwen3"))
    engine.forward_backward(batch, WANT, loss, info(batch))
    before, held = arrays(engine.gradients()), torch.cuda.memory_allocated()
    engine.offload(frozenset({Part.GRADS}))
    assert held - torch.cuda.memory_allocated() >= sum(grad.nbytes for grad in before.values())
    engine.onload(frozenset({Part.GRADS}))
    assert worst(arrays(engine.gradients()), before) == 0


def test_offload_frees_the_device_and_changes_nothing(folder_of: Folder) -> None:
    batch = make_batch()
    results = []
    for moves in (False, True):
        engine = make_engine(folder_of("qwen3"), lr=1e-2)
        size = sum(4 * p.numel() for p in engine.policy.parameters())
        for index in range(3):
            if moves:
                held = torch.cuda.memory_allocated()
                engine.offload(EVERYTHING)
                assert not any(p.untyped_storage().nbytes() for p in engine.policy.parameters())
                assert held - torch.cuda.memory_allocated() >= size * (3 if index else 1)
                if index:
                    # A thread made it before the first step, and pinned it.
                    assert engine._parked._host["optimizer"].bytes.is_pinned()
                engine.onload(EVERYTHING)
            engine.forward_backward(batch, WANT, loss, info(batch, index))
            if moves:
                engine.offload(frozenset({Part.OPTIMIZER}))
                engine.onload(frozenset({Part.OPTIMIZER}))
            engine.step()
        results.append(arrays(engine.weights()))
    # the fused kernel's backward is not deterministic
    assert worst(results[1], results[0]) < 1e-2


def test_moments_and_masters_in_host_memory_leave_the_device_free(
    folder_of: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "PIECE", 10_000)
    batch, results, held = make_batch(), [], []
    for away in (False, True):
        before = torch.cuda.memory_allocated()
        engine = make_engine(folder_of("qwen3"), lr=1e-2, offload_optimizer=away)
        for index in range(3):
            engine.forward_backward(batch, WANT, loss, info(batch, index))
            engine.step()
        held.append(torch.cuda.memory_allocated() - before)
        results.append(arrays(engine.weights()))
    size = sum(12 * p.numel() for p in engine.policy.parameters())
    assert held[0] - held[1] > 0.9 * size
    # the fused kernel's backward is not deterministic
    assert worst(results[1], results[0]) < 1e-2


def eight_bits(device: str, **shapes: tuple[int, ...]) -> tuple[dict[str, nn.Parameter], Moments]:
    """Weights of these shapes, with moments in 8 bits where rows are whole blocks."""
    generator = torch.Generator().manual_seed(0)
    shards = {
        name: nn.Parameter((torch.randn(shape, generator=generator) / 8).to(device))
        for name, shape in shapes.items()
    }
    config = FSDPConfig(optimizer=OptimizerName.ADAMW8BIT, weight_decay=0.1)
    blocks = {name: size for name, p in shards.items() if (size := block_of(p.shape))}
    return shards, Moments(config, shards, blocks)


def step_of(shards: dict[str, nn.Parameter], held: Moments, index: int) -> None:
    """Take a step with gradients of many sizes, the same on every device."""
    generator = torch.Generator().manual_seed(index)
    for p in shards.values():
        size = torch.rand(p.shape, generator=generator) ** 4
        p.grad = (torch.randn(p.shape, generator=generator) * size).to(p.device)
    for piece in held.in_turn():
        held.advance(piece, 1e-2)


def test_a_compiled_step_in_8_bits_is_as_exact_as_the_cpus() -> None:
    """Three steps. A number at the border of two codes may have either."""
    pytest.importorskip("torchao")
    shapes = {"wide": (512, 256), "narrow": (96, 192), "small": (16, 32), "norm": (512,)}
    (want, cpu), (got, gpu) = (eight_bits(device, **shapes) for device in ("cpu", "cuda"))
    assert [*gpu.blocks] == ["wide", "narrow"]
    exact, _ = eight_bits("cpu", **shapes)
    adamw = Moments(FSDPConfig(weight_decay=0.1), exact)
    for index in range(3):
        for shards, held in ((want, cpu), (got, gpu), (exact, adamw)):
            step_of(shards, held, index)

    for name, right in exact.items():
        off, limit = ((each[name].cpu() - right).abs().mean() for each in (got, want))
        assert off <= 1.1 * limit + 1e-6, f"{name}: {off} off, {limit} on the CPU"
        for key, tensor in cpu.state(name).items():
            other = gpu.state(name)[key].cpu()
            if tensor.dtype == torch.uint8:
                apart = (tensor != other).float().mean()
                assert apart < 1e-2, f"{name} {key}: {apart} of the codes differ"
            else:
                assert torch.allclose(other, tensor, rtol=1e-3, atol=1e-6), f"{name} {key}"


def test_a_compiled_step_in_8_bits_needs_little_memory() -> None:
    """Operation by operation it takes 53 bytes of each number."""
    pytest.importorskip("torchao")
    shards, held = eight_bits("cuda", weight=(4096, 2048))
    step_of(shards, held, 0)
    (piece,) = held.in_turn()
    peak = peak_bytes(lambda: held.advance(piece, 1e-2))
    assert peak < 12 * shards["weight"].numel()


@pytest.mark.parametrize("name", ["qwen3", "wide"])
def test_a_deterministic_rank_gives_equal_bits(
    folder_of: Folder, name: str, deterministic: Rank
) -> None:
    """Sums over many prompts and vocabulary tiles, in bf16 through the fused kernel."""
    batch = make_batch(200)
    engine = make_engine(folder_of(name), deterministic)
    found = []
    for _ in range(3):
        engine.forward_backward(batch, WANT, loss, info(batch))
        found.append(arrays(engine.gradients()))
    assert worst(found[1], found[0]) == worst(found[2], found[0]) == 0


def test_a_checkpoint_continues(folder_of: Folder, tmp_path: Path) -> None:
    batch = make_batch()
    engine = make_engine(folder_of("qwen2"), lr=1e-2)
    engine.forward_backward(batch, WANT, loss, info(batch))
    engine.step()
    engine.save(tmp_path, EVERYTHING).wait(60)
    resumed = make_engine(folder_of("qwen2"), lr=1e-2)
    resumed.load(tmp_path, EVERYTHING)
    np.testing.assert_array_equal(
        resumed.forward(batch, WANT)["logprobs"], engine.forward(batch, WANT)["logprobs"]
    )
    pieces = resumed._optimizer.moments.pieces
    assert {tensor.device.type for piece in pieces for tensor in piece.tensors} == {"cuda"}
