"""One GPU: weights through shared memory, bit for bit, exact log-probs, and memory that
is given back. Two GPUs: through NCCL.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from prefixes import cached_tokens

from coupler.engine_kit.inference.checksums import checksum
from coupler.interfaces import Completion, InFlight, Memory, Model, Named, Request
from coupler.plugins.manager import Plugins
from coupler.testing.edge import Served
from coupler.testing.models import write_qwen2, write_qwen3_moe
from coupler.testing.reference import TransformersReference, as_batch
from coupler_rollout_sglang.arguments import GIB, bytes_per_token, text_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
CACHE_GIB = 1.0
FIRST_KERNEL_S = 300.0


def serve(reference: TransformersReference, transport: str = "ipc", **settings: object) -> Served:
    from coupler_rollout_sglang.config import SGLangConfig
    from coupler_rollout_sglang.rollout import SGLangRollout

    given = {
        "kv_cache_gib": CACHE_GIB,
        "max_model_len": 256,
        "enforce_eager": True,
        "attention_backend": os.environ.get("COUPLER_SGLANG_ATTENTION", ""),
        **settings,
    }
    return Served(
        SGLangRollout(SGLangConfig(**given), Model(str(reference.folder))),  # type: ignore[arg-type]
        Plugins.load().get("transport", transport),
    )


def tensors(reference: TransformersReference, factor: float = 1.0) -> list[Named]:
    return [
        (n, (factor * torch.from_numpy(t)).cuda().bfloat16()) for n, t in reference.tensors.items()
    ]


def push(served: Served, weights: list[Named]) -> None:
    """Push, and compare a checksum of every tensor in the model worker with that of the
    tensor that was sent.
    """
    sent, receipt = served.push(iter(weights))
    assert sent.num_tensors == receipt.num_received == receipt.num_loaded == len(weights)
    assert (receipt.missing, receipt.unexpected) == ((), ())
    (found,) = served.run(served.rollout.checksums)
    assert found == {name: checksum(tensor) for name, tensor in weights}


def generate(served: Served, *requests: Request, deadline_s: float = 60.0) -> list[Completion]:
    async def together() -> list[Completion]:
        return await asyncio.gather(*map(served.rollout.generate, requests))

    return served.run(together, deadline_s)


def difference(reference: TransformersReference, request: Request, done: Completion) -> float:
    want = reference.logprobs_of(request.prompt, done.tokens, request.temperature or 1.0)
    return float(np.abs(want - done.logprobs).mean())


@pytest.fixture(scope="module")
def live(reference: TransformersReference) -> Iterator[Served]:
    """With CUDA graphs."""
    one = serve(reference, enforce_eager=False)
    yield one
    one.close()


def test_shared_memory_brings_every_bit(live: Served, reference: TransformersReference) -> None:
    """Through the loader first, through its plan afterwards."""
    for factor in (0.5, 2.0, 1.0):
        push(live, tensors(reference, factor))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl_brings_every_bit_to_another_device(
    reference: TransformersReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This process keeps both. The engine's processes, which start now, see the second.
    torch.cuda.init()
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "1")
    one = serve(reference, "nccl")
    try:
        for factor in (0.5, 2.0, 1.0):
            push(one, tensors(reference, factor))
    finally:
        one.close()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_are_those_of_the_reference(
    live: Served, reference: TransformersReference, temperature: float
) -> None:
    push(live, tensors(reference))
    requests = [Request((5, 6, 7 + i), 24, temperature, seed=i) for i in range(16)]
    for request, done in zip(requests, generate(live, *requests), strict=True):
        assert difference(reference, request, done) < 0.1
        assert set(done.versions) == {live.edge.version}


def test_seeds_decide_and_differ(live: Served, reference: TransformersReference) -> None:
    """Alone and among others; ``top_p`` has another path through the sampler."""
    push(live, tensors(reference))
    for top_p in (1.0, 0.9):
        request = Request((5, 6, 7), 16, 1.0, seed=7, top_p=top_p)
        alone = generate(live, request)[0].tokens
        crowd = [Request((5, 6, 7), 16, 1.0, seed=i, top_p=top_p) for i in range(40, 80)]
        *others, again = generate(live, *crowd, request)
        # In bf16 a row's logits depend on the batch in their last bits.
        same = sum(a == b for a, b in zip(alone, again.tokens, strict=True))
        assert same >= 8
        assert len({done.tokens for done in others}) == len(others)


def test_the_cache_is_as_large_as_it_was_asked_for(
    live: Served, reference: TransformersReference
) -> None:
    each = bytes_per_token(text_config(reference.folder), "bfloat16", live.rollout.config)
    (worker,) = live.rollout.workers
    assert worker.cache_tokens == pytest.approx(CACHE_GIB * GIB / each, rel=0.02)


def test_a_budget_for_weights_and_cache_is_kept(tmp_path: Path) -> None:
    """The formula of ``mem_fraction_static``, against the pool that SGLang made."""
    folder = write_qwen2(tmp_path / "model", tied=False, hidden_size=512, intermediate_size=2048)
    reference = TransformersReference(folder)
    weights = 2 * sum(tensor.size for tensor in reference.tensors.values())
    served = serve(reference, kv_cache_gib=0.0, gpu_memory_gib=4.0)
    try:
        each = bytes_per_token(text_config(folder), "bfloat16", served.rollout.config)
        (worker,) = served.rollout.workers
        assert worker.cache_tokens * each == pytest.approx(4 * GIB - weights, rel=0.15)
    finally:
        served.close()


def test_memory_is_given_back_and_three_updates_leave_it_flat(
    live: Served, reference: TransformersReference
) -> None:
    """The device's own count, with sleep between the updates."""
    push(live, tensors(reference))
    request = Request((5, 6, 7), 12, seed=3)
    (before,) = generate(live, request)
    free: list[tuple[int, int]] = []

    async def nap() -> None:
        rollout = live.rollout
        await rollout.pause(InFlight.DRAIN)
        await rollout.sleep(frozenset({Memory.KV_CACHE}))
        await rollout.sleep(frozenset({Memory.WEIGHTS}))
        asleep = torch.cuda.mem_get_info()[0]
        await rollout.wake(frozenset({Memory.WEIGHTS}))
        await live.edge.push(iter(weights))
        await rollout.wake(frozenset({Memory.KV_CACHE}))
        free.append((asleep, torch.cuda.mem_get_info()[0]))
        await rollout.resume()

    weights = tensors(reference)
    for _ in range(4):
        live.run(nap)
        assert difference(reference, request, generate(live, request)[0]) < 0.1
    assert generate(live, request)[0].tokens == before.tokens

    # The first round makes what later ones keep.
    asleep, awake = zip(*free[1:], strict=True)
    assert min(asleep) - max(awake) > 0.9 * CACHE_GIB * GIB
    for column in (asleep, awake):
        assert max(column) - min(column) < 64 << 20


def test_in_place_updates_name_the_version_of_every_token(
    live: Served, reference: TransformersReference
) -> None:
    """Also with a batch in flight: SGLang schedules one ahead."""
    push(live, tensors(reference))

    async def story() -> Completion:
        rollout = live.rollout
        running = asyncio.ensure_future(rollout.generate(Request((5, 6), 240, seed=1)))
        await asyncio.sleep(0.2)
        await rollout.pause(InFlight.STALE_KV)
        await live.edge.push(iter(tensors(reference, 0.5)))
        await rollout.resume()
        return await running

    done = live.run(story)
    versions = list(done.versions)
    assert versions == sorted(versions) and len(versions) == 240
    old = versions.count(live.edge.version - 1)
    want = reference.logprobs_of((5, 6), done.tokens, 1.0)
    assert old > 0 and np.abs(want - done.logprobs)[:old].mean() < 0.1


def test_every_update_is_quantised_for_graphs_and_after_a_nap(
    reference: TransformersReference,
) -> None:
    """fp8 with CUDA graphs, which read the weights where they were captured."""
    served = serve(reference, enforce_eager=False, quantization="fp8")

    async def nap() -> None:
        await served.rollout.pause(InFlight.DRAIN)
        await served.rollout.sleep(frozenset(Memory))
        await served.rollout.wake(frozenset(Memory))
        await served.edge.push(iter(tensors(reference)))
        await served.rollout.resume()

    try:
        free = []
        requests = [Request((5, 6, 7 + i), 24, seed=i) for i in range(8)]
        for factor in (0.5, 1.0, 2.0, 1.0):
            _, receipt = served.push(iter(tensors(reference, factor)))
            assert receipt.num_received == receipt.num_loaded == len(reference.tensors)
            assert (receipt.missing, receipt.unexpected) == ((), ())
            assert receipt.dtype == "torch.float8_e4m3fn"
            done = generate(served, *requests)
            found = [difference(reference, r, d) for r, d in zip(requests, done, strict=True)]
            assert np.mean(found) < 0.2 if factor == 1.0 else np.mean(found) > 0.5
            free.append(torch.cuda.mem_get_info()[0])
        assert max(free[1:]) - min(free[1:]) < 64 << 20

        served.run(nap)
        done = generate(served, *requests)
        found = [difference(reference, r, d) for r, d in zip(requests, done, strict=True)]
        assert np.mean(found) < 0.2
    finally:
        served.close()


@pytest.mark.parametrize("quantization", ["", "fp8"])
def test_experts_arrive(tmp_path: Path, quantization: str) -> None:
    """A mixture of experts: its kernels may want their weights in another form."""
    reference = TransformersReference(write_qwen3_moe(tmp_path / "moe"))
    served = serve(reference, quantization=quantization)
    try:
        # The first use of an expert kernel compiles it.
        requests = [Request((5, 6, 7 + i), 24, seed=i) for i in range(8)]
        generate(served, requests[0], deadline_s=FIRST_KERNEL_S)
        for factor in (0.5, 1.0):
            _, receipt = served.push(iter(tensors(reference, factor)))
            assert (receipt.missing, receipt.unexpected) == ((), ())
            done = generate(served, *requests)
            found = [difference(reference, r, d) for r, d in zip(requests, done, strict=True)]
            # A router that is nearly undecided may choose otherwise in bf16.
            limit = 0.5 if quantization else 0.1
            assert np.median(found) < limit if factor == 1.0 else np.median(found) > 1.0, found
    finally:
        served.close()


PREFIX = tuple(range(10, 74))
NEAR = 0.25
"""How far apart router logits may be for bf16 to swap their experts."""


@pytest.fixture(scope="module")
def routed(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Served, TransformersReference]]:
    """Experts with CUDA graphs, and the reference with the weights in bf16."""
    folder = write_qwen3_moe(tmp_path_factory.mktemp("models") / "moe", num_hidden_layers=3)
    reference = TransformersReference(folder)
    for parameter in reference.model.parameters():
        parameter.data = parameter.data.bfloat16().double()
    served = serve(reference, enforce_eager=False, routed_experts=True)
    yield served, reference
    served.close()


def replayed(
    reference: TransformersReference, request: Request, done: Completion
) -> tuple[np.ndarray, np.ndarray]:
    """Send the tokens of a completion where SGLang sent them. Return their log-probs
    and the logits of every router, [fed, layers, experts].
    """
    routers = [m for name, m in reference.model.named_modules() if name.endswith("mlp.gate")]
    logits: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _module, _args, out: logits.append(out[0]))
        for router in routers
    ]
    batch = as_batch(request.prompt, done.tokens, request.temperature)
    out = reference.outputs(batch.with_tokens(routed_experts=done.routed_experts))
    for hook in hooks:
        hook.remove()
    found = torch.stack(logits, 1).detach().numpy()[:-1]
    return out["logprobs"][len(request.prompt) :], found


@pytest.mark.parametrize("how", [None, InFlight.RECOMPUTE, InFlight.STALE_KV])
def test_routed_experts_are_those_of_the_model(
    routed: tuple[Served, TransformersReference], how: InFlight | None
) -> None:
    """Of a cached prefix, a prompt and a completion. A router's choice depends on those
    before it, so that the reference follows them and is asked for the next one.
    """
    served, reference = routed
    served.push(iter(tensors(reference)))
    requests = [Request((*PREFIX, 7 + i), 180, seed=i, routed_experts=True) for i in range(8)]
    warm = (Request((*PREFIX, 100 + i), 8, seed=i) for i in range(8))
    generate(served, *warm, deadline_s=FIRST_KERNEL_S)

    async def story() -> list[Completion]:
        running = [asyncio.ensure_future(served.rollout.generate(r)) for r in requests]
        if how is not None:
            await asyncio.sleep(0.06)
            await served.rollout.pause(how)
            await served.edge.push(iter(tensors(reference)))
            await served.rollout.resume()
        return await asyncio.gather(*running)

    with cached_tokens(served.rollout) as cached:
        completions = served.run(story)
    assert max(cached) >= len(PREFIX)
    if how is not None:
        assert {len(set(done.versions)) for done in completions} == {2}, (
            "the pause came too early or late"
        )

    same, differences = [], []
    for request, done in zip(requests, completions, strict=True):
        assert done.routed_experts.shape == (len(PREFIX) + 1 + 180, 3, 2)
        assert (done.routed_experts[-1] == -1).all()
        chosen = done.routed_experts[:-1].astype(np.int64)
        assert (chosen[..., 0] != chosen[..., 1]).all()

        logprobs, logits = replayed(reference, request, done)
        of_chosen = np.take_along_axis(logits, chosen, 2).min(2)
        np.put_along_axis(logits, chosen, -np.inf, 2)
        gaps = logits.max(2) - of_chosen
        assert gaps.max() < NEAR, f"the largest gap of each layer: {gaps.max(0)}"
        same.append((gaps < 0).mean())
        differences.append(np.abs(logprobs - done.logprobs).mean())
    assert np.mean(same) > 0.95
    assert max(differences) < 0.1, "the experts of a token compute something else"
