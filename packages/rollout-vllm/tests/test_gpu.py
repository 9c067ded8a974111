"""One GPU: weights through shared memory, bit for bit, and memory that is given back.
Two GPUs: through NCCL.

CUDA graphs and compilation are on in the hand-over tests, off elsewhere: a start with
them takes a minute.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coupler.engine_kit.lora_names import names_of, random_like
from coupler.errors import ReplicaDied
from coupler.interfaces import Completion, InFlight, Memory, Model, Named, Rank, Request
from coupler.plugins.manager import Plugins
from coupler.testing.edge import Served
from coupler.testing.models import rewrite, write_qwen3_moe
from coupler.testing.reference import TransformersReference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
CACHE_GIB = 1.0


def serve(
    reference: TransformersReference, transport: str, *, enforce_eager: bool = True
) -> Served:
    from coupler_rollout_vllm.config import VLLMConfig
    from coupler_rollout_vllm.rollout import VLLMRollout

    config = VLLMConfig(enforce_eager=enforce_eager, kv_cache_gib=CACHE_GIB, max_model_len=256)
    return Served(
        VLLMRollout(config, Model(str(reference.folder))),
        Plugins.load().get("transport", transport),
    )


def tensors(reference: TransformersReference, factor: float = 1.0) -> list[Named]:
    return [
        (n, (factor * torch.from_numpy(t)).cuda().bfloat16()) for n, t in reference.tensors.items()
    ]


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
    """Push, and compare a checksum of every tensor in the model worker with that of the
    tensor that was sent.
    """
    from coupler.engine_kit.inference.checksums import checksum

    sent, receipt = served.push(iter(weights))
    assert sent.num_tensors == receipt.num_received == receipt.num_loaded == len(weights)
    assert (receipt.missing, receipt.unexpected) == ((), ())
    (found,) = served.run(served.rollout.checksums)
    assert found == {name: checksum(tensor) for name, tensor in weights}


def test_an_adapter_upon_weights_that_came_once(
    reference: TransformersReference, tmp_path: Path
) -> None:
    """With CUDA graphs; after its memory slept, the weights come again, and which
    tokens run with it is known anew.
    """
    from coupler_rollout_vllm.config import VLLMConfig
    from coupler_rollout_vllm.rollout import VLLMRollout

    config = VLLMConfig(kv_cache_gib=CACHE_GIB, max_model_len=256, max_lora_rank=8)
    served = Served(
        VLLMRollout(config, Model(str(reference.folder))), Plugins.load().get("transport", "ipc")
    )

    async def nap() -> None:
        rollout = served.rollout
        await rollout.pause(InFlight.DRAIN)
        await rollout.sleep(frozenset(Memory))
        await rollout.wake(frozenset(Memory))
        assert not await rollout.holds_base()
        await rollout.resume()

    try:
        for seed in range(3):
            merged, adapter = dict(reference.tensors), []
            for name, tensor in reference.tensors.items():
                if "_proj.weight" in name:
                    shapes = ((8, tensor.shape[1]), (tensor.shape[0], 8))
                    drawn = [
                        random_like(f"{n}{seed}", np.zeros(shape))
                        for n, shape in zip("AB", shapes, strict=True)
                    ]
                    a, b = (torch.from_numpy(t).cuda().bfloat16() for t in drawn)
                    adapter += zip(names_of(name), (a, b), strict=True)
                    merged[name] = tensor + (b.float() @ a.float()).cpu().numpy()
            if not served.run(served.rollout.holds_base):
                push(served, tensors(reference))
            _, receipt = served.push(iter(adapter), adapter=True)
            assert (receipt.num_loaded, receipt.missing, receipt.unexpected) == (28, (), ())
            check(
                served,
                TransformersReference(rewrite(reference.folder, tmp_path / str(seed), merged)),
            )
            if seed:
                served.run(nap)
    finally:
        served.close()


def test_shared_memory_brings_every_bit(served: Served, reference: TransformersReference) -> None:
    """Through the loader first, through its plan afterwards."""
    for factor in (0.5, 2.0, 1.0):
        push(served, tensors(reference, factor))
    check(served, reference)


def test_tensors_larger_than_the_memory_arrive(
    served: Served, reference: TransformersReference
) -> None:
    served.edge.transport.largest = 60_000  # type: ignore[attr-defined]
    push(served, tensors(reference, 1.5))
    push(served, tensors(reference))
    check(served, reference)


def test_memory_is_given_back_by_part(served: Served, reference: TransformersReference) -> None:
    async def story() -> None:
        rollout, pids = served.rollout, engine_pids(served)
        await rollout.pause(InFlight.DRAIN)
        for _ in range(3):
            before = gpu_bytes(*pids)
            await rollout.sleep(frozenset({Memory.KV_CACHE}))
            assert before - gpu_bytes(*pids) > 0.95 * CACHE_GIB * 2**30
            await rollout.sleep(frozenset({Memory.WEIGHTS}))
            await rollout.wake(frozenset({Memory.WEIGHTS}))
            await served.edge.push(iter(tensors(reference)))
            await rollout.wake(frozenset({Memory.KV_CACHE}))
            assert abs(gpu_bytes(*pids) - before) < 64 << 20
        await rollout.resume()

    served.run(story)
    check(served, reference)


def gpu_bytes(*pids: int) -> int:
    """Device memory of these processes, as the driver counts it."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    listed = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    used = {
        int(pid): int(mib) << 20
        for pid, mib in (line.split(", ") for line in listed.strip().splitlines())
    }
    if not used.keys() >= set(pids):
        pytest.skip(
            f"the driver lists {sorted(used)}, not {pids}: process ids of another namespace"
        )
    return sum(used[pid] for pid in pids)


def engine_pids(served: Served) -> tuple[int, ...]:
    return tuple(worker["pid"] for worker in served.rollout.workers)


@pytest.fixture(scope="module")
def graphs(reference: TransformersReference) -> Iterator[Served]:
    """A replica as users have it, with compilation and CUDA graphs."""
    one = serve(reference, "ipc", enforce_eager=False)
    yield one
    one.close()


def host_bytes(*pids: int) -> int:
    """Resident memory of these processes, without what they share."""
    fields = [Path(f"/proc/{pid}/statm").read_text().split() for pid in pids]
    return sum(int(resident) - int(shared) for _, resident, shared, *_ in fields) * os.sysconf(
        "SC_PAGE_SIZE"
    )


async def hand_over(served: Served, weights: list[Named]) -> None:
    """What a step of training does to the rollout's memory."""
    rollout = served.rollout
    await rollout.pause(InFlight.DRAIN)
    await rollout.sleep(frozenset({Memory.KV_CACHE}))
    await rollout.sleep(frozenset({Memory.WEIGHTS}))
    await rollout.wake(frozenset({Memory.WEIGHTS}))
    await served.edge.push(iter(weights))
    await rollout.wake(frozenset({Memory.KV_CACHE}))
    await rollout.resume()


def test_200_hand_overs_leave_memory_flat_and_graphs_valid(
    graphs: Served, reference: TransformersReference
) -> None:
    weights = tensors(reference)
    pids = (os.getpid(), *engine_pids(graphs))

    async def cycles(count: int) -> None:
        for _ in range(count):
            await hand_over(graphs, weights)

    graphs.run(lambda: cycles(10))
    check(graphs, reference)
    device, ours, host = gpu_bytes(*pids), torch.cuda.memory_allocated(), host_bytes(*pids)
    graphs.run(lambda: cycles(200), deadline_s=300.0)
    assert gpu_bytes(*pids) - device < 64 << 20
    assert torch.cuda.memory_allocated() - ours < 1 << 20
    assert host_bytes(*pids) - host < 64 << 20
    check(graphs, reference)


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_every_update_is_quantised_for_graphs_and_after_a_nap(
    reference: TransformersReference, tmp_path: Path, experts: bool
) -> None:
    """fp8 with CUDA graphs, which read the weights where they were captured."""
    from coupler_rollout_vllm.config import VLLMConfig
    from coupler_rollout_vllm.rollout import VLLMRollout

    if experts:
        reference = TransformersReference(write_qwen3_moe(tmp_path / "moe"))
    config = VLLMConfig(quantization="fp8", kv_cache_gib=CACHE_GIB, max_model_len=256)
    rollout = VLLMRollout(config, Model(str(reference.folder)))
    served = Served(rollout, Plugins.load().get("transport", "ipc"))

    async def nap() -> None:
        await rollout.pause(InFlight.DRAIN)
        await rollout.sleep(frozenset(Memory))
        await rollout.wake(frozenset(Memory))
        await served.edge.push(iter(tensors(reference)))
        await rollout.resume()

    def differs() -> float:
        found = []
        for seed in range(8):
            request = Request((5, 6, 7 + seed), 24, seed=seed)

            async def sample(request: Request = request) -> Completion:
                return await rollout.generate(request)

            done = served.run(sample)
            want = reference.logprobs_of(request.prompt, done.tokens, 1.0)
            found.append(np.abs(want - done.logprobs).mean())
        return float(np.mean(found))

    try:
        free = []
        for factor in (0.5, 1.0, 2.0, 1.0):
            _, receipt = served.push(iter(tensors(reference, factor)))
            assert receipt.num_received == receipt.num_loaded == len(reference.tensors)
            assert (receipt.missing, receipt.unexpected) == ((), ())
            assert receipt.dtype == "torch.float8_e4m3fn"
            limit = 0.5 if experts else 0.2
            assert differs() < limit if factor == 1.0 else differs() > 0.5
            free.append(torch.cuda.mem_get_info()[0])
        assert max(free[1:]) - min(free[1:]) < 64 << 20

        served.run(nap)
        assert differs() < limit
    finally:
        served.close()


def test_a_sleeping_replica_leaves_the_device_to_others(
    graphs: Served, reference: TransformersReference
) -> None:
    """What stays is its CUDA context and its graphs; the ledger's own figure falls as
    far as the driver's.
    """
    push(graphs, tensors(reference))
    pids = engine_pids(graphs)

    async def sleep() -> int:
        await graphs.rollout.pause(InFlight.DRAIN)
        before = await graphs.rollout.device_bytes()
        await graphs.rollout.sleep(frozenset(Memory))
        return before - await graphs.rollout.device_bytes()

    async def wake() -> None:
        await graphs.rollout.wake(frozenset(Memory))
        await graphs.edge.push(iter(tensors(reference)))
        await graphs.rollout.resume()

    awake = gpu_bytes(*pids)
    fell = graphs.run(sleep)
    asleep = gpu_bytes(*pids)
    graphs.run(wake)
    check(graphs, reference)
    assert awake - asleep > 0.95 * CACHE_GIB * 2**30
    assert abs(fell - (awake - asleep)) < 64 << 20
    assert asleep < 2**30


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl_brings_every_bit_to_another_device(
    reference: TransformersReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    # this process keeps all; the engine's processes, which start now, see the second
    # only
    torch.cuda.init()
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "1")
    one = serve(reference, "nccl")
    try:
        for factor in (0.5, 1.0):
            push(one, tensors(reference, factor))
        check(one, reference)
    finally:
        one.close()


def test_requests_in_flight_continue_on_new_weights(
    served: Served, reference: TransformersReference
) -> None:
    async def story() -> None:
        rollout = served.rollout
        for how in (InFlight.RECOMPUTE, InFlight.STALE_KV):
            running = [
                asyncio.ensure_future(rollout.generate(Request((5, 6 + i), 200, seed=i)))
                for i in range(4)
            ]
            await asyncio.sleep(0.1)
            await rollout.pause(how)
            await served.edge.push(iter(tensors(reference)))
            await rollout.resume()
            completions = await asyncio.gather(*running)
            assert {len(done.versions) for done in completions} == {200}
            assert all(list(done.versions) == sorted(done.versions) for done in completions)
            assert {len(set(done.versions)) for done in completions} == {2}, (
                "the pause came too late"
            )

    push(served, tensors(reference))
    served.run(story)


@pytest.mark.parametrize("how", [None, InFlight.RECOMPUTE])
def test_routed_experts_are_those_of_the_model(tmp_path: Path, how: InFlight | None) -> None:
    """Of prompt and completion; in bf16, some of the closest choices differ."""
    from transformers import AutoModelForCausalLM

    from coupler.testing.models import write_qwen3_moe
    from coupler_rollout_vllm.config import VLLMConfig
    from coupler_rollout_vllm.rollout import VLLMRollout

    reference = TransformersReference(write_qwen3_moe(tmp_path / "moe"))
    plain = AutoModelForCausalLM.from_pretrained(reference.folder, trust_remote_code=False)
    config = VLLMConfig(
        enforce_eager=True, kv_cache_gib=CACHE_GIB, max_model_len=256, routed_experts=True
    )
    one = Served(
        VLLMRollout(config, Model(str(reference.folder))), Plugins.load().get("transport", "ipc")
    )
    requests = [Request((5, 6, 7 + i), 60, seed=i, routed_experts=True) for i in range(4)]

    async def story() -> list[Completion]:
        await one.edge.push(iter(tensors(reference)))
        running = [asyncio.ensure_future(one.rollout.generate(r)) for r in requests]
        if how is not None:
            await asyncio.sleep(0.1)
            await one.rollout.pause(how)
            await one.edge.push(iter(tensors(reference)))
            await one.rollout.resume()
        return await asyncio.gather(*running)

    try:
        for request, done in zip(requests, one.run(story), strict=True):
            ids = torch.tensor([[*request.prompt, *done.tokens]])
            scores = plain(ids, output_router_logits=True).router_logits
            want = torch.stack(
                [layer.topk(2, dim=-1).indices.sort(-1).values for layer in scores], 1
            ).numpy()
            assert done.routed_experts.shape == want.shape
            assert (done.routed_experts[-1] == -1).all()
            found = np.sort(done.routed_experts[:-1], 2)
            assert (found == want[:-1]).all(2).mean() > 0.9
    finally:
        one.close()


# --- the engine's process is killed

WITHIN_S = 30.0


@pytest.fixture(scope="module")
def mortal(reference: TransformersReference) -> Iterator[Served]:
    one = serve(reference, "ipc")
    yield one
    one.close()


def kill(served: Served) -> None:
    for worker in served.rollout.workers:
        os.kill(worker["pid"], signal.SIGKILL)


async def while_idle(served: Served, weights: list[Named]) -> Any:
    kill(served)
    await asyncio.sleep(0.5)
    return served.rollout.pause(InFlight.DRAIN)


async def while_it_samples(served: Served, weights: list[Named]) -> Any:
    running = asyncio.ensure_future(served.rollout.generate(Request((5, 6), 240)))
    while not served.rollout.running:
        await asyncio.sleep(0)
    kill(served)
    return running


async def while_it_is_sent_weights(served: Served, weights: list[Named]) -> Any:
    await served.rollout.pause(InFlight.DRAIN)
    started, loop = asyncio.Event(), asyncio.get_running_loop()

    def slowly() -> Iterator[Named]:
        for i, named in enumerate(weights):
            if i == 5:
                loop.call_soon_threadsafe(started.set)
                time.sleep(1.0)
            yield named

    pushing = asyncio.ensure_future(served.edge.push(slowly()))
    await started.wait()
    kill(served)
    return pushing


async def while_it_wakes(served: Served, weights: list[Named]) -> Any:
    await served.rollout.pause(InFlight.DRAIN)
    await served.rollout.sleep(frozenset(Memory))
    waking = asyncio.ensure_future(served.rollout.wake(frozenset({Memory.WEIGHTS})))
    await asyncio.sleep(0)
    kill(served)
    return waking


@pytest.mark.parametrize(
    "phase", [while_idle, while_it_samples, while_it_is_sent_weights, while_it_wakes]
)
def test_a_killed_engine_is_named_at_once_and_starts_again(
    mortal: Served, reference: TransformersReference, phase: Callable[[Served, list[Named]], Any]
) -> None:
    """Its memory is free again when the next one starts, and what it shared with us is
    no trap.
    """
    rollout, weights = mortal.rollout, tensors(reference)
    push(mortal, weights)

    async def fails(failing: Any) -> None:
        await failing
        await rollout.pause(InFlight.DRAIN)  # it woke before it was killed

    async def story() -> None:
        failing = await phase(mortal, weights)
        start = time.monotonic()
        with pytest.raises(ReplicaDied, match="the vLLM engine of rollout replica 0 died"):
            await fails(failing)
        assert time.monotonic() - start < WITHIN_S

    mortal.run(story)
    mortal.run(lambda: rollout.setup(Rank(seed=1)), deadline_s=300.0)
    mortal.run(rollout.resume)
    push(mortal, weights)
    check(mortal, reference)
