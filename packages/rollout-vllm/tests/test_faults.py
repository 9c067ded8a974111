"""The engine's process is killed: a named error or recovery within seconds, no sample lost or used twice."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from coupler.errors import ReplicaDied
from coupler.executors import Local
from coupler.interfaces import Completion, InFlight, Model, Named, Rank, Request
from coupler.rollouts import RolloutGroup
from coupler.testing.edge import Served
from coupler.testing.reference import TransformersReference
from coupler.waiting import Waits
from coupler_rollout_vllm.config import VLLMConfig

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

    async def revive() -> None:
        if not served.rollout.gate.is_set():
            await served.rollout.resume()
        await served.rollout.setup(Rank(seed=1))

    try:
        served.run(lambda: served.rollout.pause(InFlight.DRAIN))
        served.run(served.rollout.resume)
    except ReplicaDied:
        served.run(revive, deadline_s=300.0)
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


@pytest.mark.parametrize("after_s", [0.0, 0.1])  # with nothing sampled yet; between two tokens
def test_killed_while_it_samples(fresh: Served, after_s: float) -> None:
    async def story() -> Any:
        running = asyncio.ensure_future(fresh.rollout.generate(Request((5, 6), 240)))
        while not fresh.rollout.running:
            await asyncio.sleep(0)
        await asyncio.sleep(after_s)
        assert not running.done()
        return kill(fresh.rollout), running

    died_within(fresh, story)
    assert not fresh.rollout.running


def test_killed_during_a_sync(fresh: Served, reference: TransformersReference) -> None:
    async def story() -> Any:
        await fresh.rollout.pause(InFlight.DRAIN)
        started = asyncio.Event()
        loop = asyncio.get_running_loop()

        def slowly() -> Iterator[Named]:
            for i, named in enumerate(weights(reference)):
                if i == 5:
                    loop.call_soon_threadsafe(started.set)
                    time.sleep(1.0)
                yield named

        pushing = asyncio.ensure_future(fresh.edge.push(slowly()))
        await started.wait()
        return kill(fresh.rollout), pushing

    died_within(fresh, story)


def test_unfinished_requests_go_to_the_other_replica(reference: TransformersReference) -> None:
    """Two replicas, one killed while it decodes: every request gives one completion, and the dead one comes back."""
    requests = [Request((5, 6 + i), 100, seed=i) for i in range(8)]

    async def sync(group: RolloutGroup) -> None:
        from coupler.plugins.manager import Plugins
        from coupler.testing.edge import Edge

        for handle in group.replicas:
            await Edge(Plugins.load().get("transport", "tcp"), handle.of, 1).push(weights(reference))

    async def story() -> list[Completion]:
        executor = Local(inline=True, waits=Waits(300.0, 60.0))
        ranks = [Rank(index=i, world=2, seed=1) for i in range(2)]
        model = Model(str(reference.folder))
        group = RolloutGroup(executor, "coupler_rollout_vllm.rollout:VLLMRollout", VLLMConfig(), model, ranks)
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
