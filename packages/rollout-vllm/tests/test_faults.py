"""The engine's process is killed: a named error or recovery within seconds, no sample
lost or used twice.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coupler.config.schema import SyncConfig
from coupler.errors import ReplicaDied
from coupler.executors import Local
from coupler.executors.waits import Waits
from coupler.interfaces import Completion, InFlight, Memory, Model, Named, Rank, Request
from coupler.loop.device_memory import Residency
from coupler.loop.engine_group import EngineGroup
from coupler.loop.rollout_group import RolloutGroup
from coupler.loop.weight_sync import StreamShardingManager
from coupler.plugins.manager import Plugins
from coupler.testing.edge import Served
from coupler.testing.gates import await_end
from coupler.testing.reference import TransformersReference
from coupler.testing.subject import configured
from coupler.worker.replica import RolloutSpec
from coupler.worker.spec import WorkerSpec
from coupler_rollout_vllm.config import Precision, VLLMConfig

WITHIN_S = 30.0


def kill(rollout: Any) -> float:
    for worker in rollout.workers:
        os.kill(worker["pid"], signal.SIGKILL)
    return time.monotonic()


def weights(reference: TransformersReference) -> Iterator[Named]:
    for name, tensor in reference.tensors.items():
        yield name, torch.from_numpy(tensor)


@pytest.fixture
def fresh(served: Served, reference: TransformersReference) -> Served:
    """The replica of this file, started again after it was killed."""
    if served.revive():
        served.push(weights(reference))
    return served


def died_within(served: Served, story: Callable[[], Any]) -> None:
    """``story`` kills the engine and returns when, and what must fail then."""

    async def told() -> None:
        start, failing = await story()
        with pytest.raises(ReplicaDied, match="the vLLM engine of rollout replica 0 died"):
            await asyncio.wait_for(failing, WITHIN_S)
        assert time.monotonic() - start < WITHIN_S

    served.run(told)


def test_killed_while_idle(fresh: Served) -> None:
    async def story() -> Any:
        start = kill(fresh.rollout)
        await asyncio.sleep(1)
        return start, fresh.rollout.pause(InFlight.DRAIN)

    died_within(fresh, story)


def test_killed_while_it_samples(fresh: Served) -> None:
    """One request has some tokens by then, and nothing of the other has been
    sampled.
    """

    async def story() -> Any:
        first = asyncio.ensure_future(fresh.rollout.generate(Request((5, 6), 240)))
        await asyncio.sleep(0.1)
        late = asyncio.ensure_future(fresh.rollout.generate(Request((5, 7), 240)))
        while len(fresh.rollout.running) < 2:
            await asyncio.sleep(0)
        start = kill(fresh.rollout)
        with pytest.raises(ReplicaDied):
            await asyncio.wait_for(first, WITHIN_S)
        return start, late

    died_within(fresh, story)
    assert not fresh.rollout.running


OWNER = """
import asyncio, json, sys
from coupler.interfaces import Model, Rank
from coupler_rollout_vllm.config import VLLMConfig
from coupler_rollout_vllm.rollout import VLLMRollout

async def start():
    rollout = VLLMRollout(VLLMConfig(), Model(sys.argv[1]))
    await rollout.setup(Rank(seed=1))
    print("workers", json.dumps([worker["pid"] for worker in rollout.workers]), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(start())
"""


def test_the_engine_ends_with_the_process_that_started_it(
    reference: TransformersReference, tmp_path: Path
) -> None:
    """A replica whose own process was killed starts again: the device's memory must be
    free by then.
    """
    (tmp_path / "owner.py").write_text(OWNER)
    command = [sys.executable, str(tmp_path / "owner.py"), str(reference.folder)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert owner.stdout
    line = next(line for line in owner.stdout if line.startswith("workers"))
    workers = json.loads(line.removeprefix("workers"))
    assert all(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in workers)
    owner.kill()
    await_end(workers, WITHIN_S)
    owner.wait(WITHIN_S)


def one_replica(
    reference: TransformersReference, rank: int = 0
) -> tuple[RolloutGroup, StreamShardingManager]:
    """A group of one, and its edge from an engine that has the reference's weights, and
    an adapter of this rank.
    """
    plugins, executor = Plugins.load(), Local(inline=True, waits=Waits(300.0, 60.0))
    model = Model(str(reference.folder))
    target = "coupler_rollout_vllm.rollout:VLLMRollout"
    group = RolloutGroup(
        executor,
        RolloutSpec(target, VLLMConfig(dtype=Precision.FP32, max_lora_rank=rank), model),
        [Rank(seed=1)],
    )
    engine = plugins.get("engine", "fsdp")
    config = configured(engine.config, {"dtype": "fp32", "lr": 1e-3, "lora_rank": rank})
    edge = StreamShardingManager(
        SyncConfig(deadline_s=60.0),
        engine=EngineGroup(
            executor, WorkerSpec("policy", engine.target, config, model, None), [Rank(seed=1)]
        ),
        rollouts=group,
        weight_format="lora" if rank else "full",
        transport=plugins.get("transport", "tcp").target,
        probe_prompt=(5, 6, 7),
        temperature=1.0,
        residency=Residency({}, shared=False),
        in_flight=InFlight.DRAIN,
    )
    return group, edge


@pytest.mark.slow
def test_killed_in_a_sync_and_while_it_wakes(
    reference: TransformersReference,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is named within seconds, starts again, gets the weights, and samples what it
    sampled before.
    """
    group, edge = one_replica(reference)
    rollout, request = group.replicas[0].of, Request((5, 6, 7), 12, seed=3)

    def slowly(weights: Iterator[Named]) -> Iterator[Named]:
        for i, named in enumerate(weights):
            if i == 5:
                kill(rollout)
                time.sleep(1.0)
            yield named

    async def story() -> None:
        await edge.engine.setup()
        await edge.setup()
        await edge.sync(0)
        before = await group.generate(request)
        engine = edge.engine.ranks[0].of.engine
        whole = engine.weights
        with monkeypatch.context() as patched:
            starts: list[float] = []

            def weights() -> Iterator[Named]:
                starts.append(time.monotonic())
                return whole() if len(starts) > 1 else slowly(whole())

            async def setup(rank: Rank, again: Any = rollout.setup) -> int:
                assert time.monotonic() - starts[0] < WITHIN_S, (
                    "how long it took to see that it died"
                )
                return await again(rank)

            patched.setattr(engine, "weights", weights)
            patched.setattr(rollout, "setup", setup)
            await edge.sync(1)
        assert len(starts) == 2
        done = await group.generate(request)
        assert (done.tokens, set(done.versions)) == (before.tokens, {1})
        await group.pause(InFlight.DRAIN)
        await group.tell("sleep", frozenset(Memory))
        kill(rollout)
        await asyncio.wait_for(group.tell("wake", frozenset({Memory.WEIGHTS})), WITHIN_S)
        assert group.dead == {0}
        await edge.sync(2)
        done = await group.generate(request)
        assert (done.tokens, set(done.versions)) == (before.tokens, {2})

    try:
        asyncio.run(story())
    finally:
        rollout.close()
    assert capsys.readouterr().out.count("rollout replica 0 died; starting it again") == 2


@pytest.mark.slow
def test_killed_while_an_adapter_comes(
    reference: TransformersReference, capsys: pytest.CaptureFixture[str]
) -> None:
    """Started again, it gets the weights beneath the adapter too."""
    group, edge = one_replica(reference, rank=4)
    rollout = group.replicas[0].of

    async def story() -> None:
        await edge.engine.setup()
        await edge.setup()
        await edge.prove()
        engine = edge.engine.ranks[0].of.engine
        with torch.no_grad():
            for tensor in engine.adapter.parameters().values():
                tensor.add_(0.05)
        whole, calls = engine.adapter_weights, []

        def dying() -> Iterator[Named]:
            calls.append(len(calls))
            for i, named in enumerate(whole()):
                if calls == [0] and i == 5:
                    kill(rollout)
                    time.sleep(1.0)
                yield named

        engine.adapter_weights = dying
        synced = await edge.sync(1)
        assert calls == [0, 1]
        assert synced["sync/tensors"].value == len(reference.tensors) + 28
        assert (await edge.probe())["sync/probe"].value < 1e-3

    try:
        asyncio.run(story())
    finally:
        rollout.close()
    assert capsys.readouterr().out.count("rollout replica 0 died; starting it again") == 1


@pytest.mark.slow
def test_unfinished_requests_go_to_the_other_replica(reference: TransformersReference) -> None:
    """Two replicas, one killed while it decodes: every request gives one completion,
    and the dead one comes back.
    """
    requests = [Request((5, 6 + i), 100, seed=i) for i in range(8)]

    async def sync(group: RolloutGroup) -> None:
        from coupler.testing.edge import Edge

        for handle in group.replicas:
            await Edge(Plugins.load().get("transport", "tcp"), handle.of, 1).push(
                weights(reference)
            )

    async def story() -> list[Completion]:
        executor = Local(inline=True, waits=Waits(300.0, 60.0))
        ranks = [Rank(index=i, world=2, seed=1) for i in range(2)]
        model = Model(str(reference.folder))
        target = "coupler_rollout_vllm.rollout:VLLMRollout"
        group = RolloutGroup(executor, RolloutSpec(target, VLLMConfig(), model), ranks)
        await group.setup()
        try:
            await sync(group)
            running = [asyncio.ensure_future(group.generate(r)) for r in requests]
            while not all(handle.of.running for handle in group.replicas):
                await asyncio.sleep(0.01)
            kill(group.replicas[0].of)
            done = await asyncio.gather(*running)
            assert group.dead == {0}
            await group.pause(InFlight.DRAIN)
            await group.revive(InFlight.DRAIN)
            assert group.dead == set()
            await sync(group)
            await group.all("resume")
            again = await group.replicas[0].of.generate(requests[0])
            assert again.tokens == done[0].tokens
            return done
        finally:
            for handle in group.replicas:
                handle.of.close()

    done = asyncio.run(story())
    for request, one in zip(requests, done, strict=True):
        assert len(one.tokens) == len(one.logprobs) == len(one.versions) == 100
        want = reference.logprobs_of(request.prompt, one.tokens, 1.0)
        assert np.abs(want - one.logprobs).max() < 1e-3
