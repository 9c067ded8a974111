"""One GPU: weights through shared memory, bit for bit, and memory that is given back. Two GPUs: through NCCL."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from coupler.interfaces import InFlight, Memory, Model, Named, Request
from coupler.plugins.manager import Plugins
from coupler.testing.edge import Served
from coupler.testing.reference import TransformersReference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
CACHE_GIB = 1.0


def serve(reference: TransformersReference, transport: str) -> Served:
    from coupler_rollout_vllm.config import VLLMConfig
    from coupler_rollout_vllm.rollout import VLLMRollout

    config = VLLMConfig(enforce_eager=True, kv_cache_gib=CACHE_GIB, max_model_len=256)
    return Served(VLLMRollout(config, Model(str(reference.folder))), Plugins.load().get("transport", transport))


def tensors(reference: TransformersReference, factor: float = 1.0) -> list[Named]:
    return [(n, (factor * torch.from_numpy(t)).cuda().bfloat16()) for n, t in reference.tensors.items()]


@pytest.fixture(scope="module")
def served(reference: TransformersReference) -> Iterator[Served]:
    one = serve(reference, "ipc")
    yield one
    one.close()


def check(served: Served, reference: TransformersReference) -> None:
    """What it samples is what the reference says, within bf16."""

    async def sample() -> None:
        for seed in range(3):
            request = Request((5, 6, 7 + seed), 12, seed=seed)
            done = await served.rollout.generate(request)
            want = reference.logprobs_of(request.prompt, done.tokens, 1.0)
            assert np.abs(want - done.logprobs).mean() < 0.1
            assert set(done.versions) == {served.edge.version}

    served.run(sample)


def push(served: Served, weights: list[Named]) -> None:
    from coupler_rollout_vllm.worker import fingerprint

    sent, receipt = served.push(iter(weights))
    assert sent.num_tensors == receipt.num_received == receipt.num_loaded == len(weights)
    assert (receipt.missing, receipt.unexpected) == ((), ())
    assert served.run(served.rollout.fingerprints)[0] == fingerprint(tensor for _, tensor in weights)


def test_shared_memory_brings_every_bit(served: Served, reference: TransformersReference) -> None:
    """Through the loader first, through its plan afterwards."""
    for factor in (0.5, 2.0, 1.0):
        push(served, tensors(reference, factor))
    check(served, reference)


def test_tensors_larger_than_a_buffer_arrive(
    served: Served, reference: TransformersReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coupler.transports.ipc.BUFFER_BYTES", 30_000)
    push(served, tensors(reference, 1.5))
    push(served, tensors(reference))
    check(served, reference)


def test_200_syncs_leave_memory_flat(served: Served, reference: TransformersReference) -> None:
    weights = tensors(reference)
    served.push(iter(weights))
    torch.cuda.synchronize()
    before, ours = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
    for _ in range(200):
        served.push(iter(weights))
    torch.cuda.synchronize()
    assert before - torch.cuda.mem_get_info()[0] < 64 << 20
    assert torch.cuda.memory_allocated() - ours < 1 << 20
    check(served, reference)


def test_memory_is_given_back_by_part(served: Served, reference: TransformersReference) -> None:
    async def story() -> None:
        rollout = served.rollout
        await rollout.pause(InFlight.DRAIN)
        start = torch.cuda.mem_get_info()[0]
        for _ in range(3):
            await rollout.sleep(frozenset({Memory.KV_CACHE}))
            assert torch.cuda.mem_get_info()[0] - start > 0.95 * CACHE_GIB * 2**30
            await rollout.sleep(frozenset({Memory.WEIGHTS}))
            await rollout.wake(frozenset({Memory.WEIGHTS}))
            await served.edge.push(iter(tensors(reference)))
            await rollout.wake(frozenset({Memory.KV_CACHE}))
        assert abs(torch.cuda.mem_get_info()[0] - start) < 64 << 20
        await rollout.resume()

    served.run(story)
    check(served, reference)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl_brings_every_bit_to_another_device(
    reference: TransformersReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.cuda.init()  # this process keeps all; the engine's processes, which start now, see the second only
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "1")
    one = serve(reference, "nccl")
    try:
        for factor in (0.5, 1.0):
            push(one, tensors(reference, factor))
        check(one, reference)
    finally:
        one.close()


def test_requests_in_flight_continue_on_new_weights(served: Served, reference: TransformersReference) -> None:
    async def story() -> None:
        rollout = served.rollout
        for how in (InFlight.RECOMPUTE, InFlight.STALE_KV):
            running = [asyncio.ensure_future(rollout.generate(Request((5, 6 + i), 200, seed=i))) for i in range(4)]
            await asyncio.sleep(0.1)
            await rollout.pause(how)
            await served.edge.push(iter(tensors(reference)))
            await rollout.resume()
            completions = await asyncio.gather(*running)
            assert {len(done.versions) for done in completions} == {200}
            assert all(list(done.versions) == sorted(done.versions) for done in completions)
            assert {len(set(done.versions)) for done in completions} == {2}, "the pause came too late"

    push(served, tensors(reference))
    served.run(story)
