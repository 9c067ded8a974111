"""executor=ray: the process of a rollout replica is killed. It comes back; nothing is
lost or used twice.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from job_run import reproducible, write_inputs

from coupler.cli import main
from coupler.config.schema import Placement, RayConfig, SyncConfig
from coupler.errors import ReplicaDied
from coupler.executors.placement import Role
from coupler.executors.waits import Waits
from coupler.interfaces import InFlight, Model, Rank, Request
from coupler.loop.device_memory import Residency
from coupler.loop.engine_group import EngineGroup
from coupler.loop.rollout_group import MAX_RESTARTS, RolloutGroup
from coupler.loop.weight_sync import StreamShardingManager
from coupler.plugins.manager import Plugins
from coupler.testing.models import write_tokenizer, write_toy
from coupler.testing.toy_config import ToyEngineConfig, ToyRolloutConfig
from coupler.worker.replica import RolloutSpec
from coupler.worker.spec import WorkerSpec

SLOW = f"{Path(__file__).with_name('ray_rollout.py')}:SlowRollout"
REQUESTS = [Request((5, 6 + i), 40, seed=i) for i in range(8)]


pytestmark = pytest.mark.usefixtures("cluster")
Story = Callable[[RolloutGroup, StreamShardingManager], Awaitable[None]]


def told(folder: Path, story: Story, count: int = 2) -> None:
    """A toy engine and ``count`` replicas, each an actor, with weights of version 0."""
    from coupler.executors.ray.executor import OnRay

    executor = OnRay(RayConfig(placement=Placement.DISJOINT), Waits(60.0, 60.0), folder / "logs")
    plugins, model = Plugins.load(), Model(str(write_toy(folder / "model")))

    async def go() -> None:
        await executor.place([Role("policy", 1), Role("rollout", count)])
        spec = WorkerSpec(
            "policy", plugins.get("engine", "toy").target, ToyEngineConfig(), model, None
        )
        ranks = [Rank(index=i, world=count) for i in range(count)]
        group = RolloutGroup(executor, RolloutSpec(SLOW, ToyRolloutConfig(), model), ranks)
        edge = StreamShardingManager(
            SyncConfig(deadline_s=30.0),
            engine=EngineGroup(executor, spec, [Rank()]),
            rollouts=group,
            weight_format="full",
            transport=plugins.get("transport", "tcp").target,
            probe_prompt=(5, 6),
            temperature=1.0,
            residency=Residency({}, shared=False),
            in_flight=InFlight.DRAIN,
        )
        await edge.engine.setup()
        await edge.setup()
        await edge.sync(0)
        await story(group, edge)

    try:
        asyncio.run(go())
    finally:
        executor.close()


def pid(group: RolloutGroup, index: int) -> int:
    return group.executor.places[group.replicas[index]].process.pid  # type: ignore[attr-defined]


async def sampled(group: RolloutGroup) -> list[tuple[int, ...]]:
    """Of each replica."""
    done = [await group.executor.call(handle, "generate", REQUESTS[0]) for handle in group.replicas]
    return [one.tokens for one in done]


def test_a_killed_replica_s_requests_go_elsewhere_and_it_comes_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def story(group: RolloutGroup, edge: StreamShardingManager) -> None:
        want = await asyncio.gather(*map(group.generate, REQUESTS))
        running = [asyncio.ensure_future(group.generate(request)) for request in REQUESTS]
        await asyncio.sleep(0.3)
        assert all(group.router.outstanding)
        first = pid(group, 0)
        os.kill(first, signal.SIGKILL)
        assert await asyncio.gather(*running) == want
        assert (group.dead, group.router.outstanding) == ({0}, [0, 0])
        await edge.sync(1)
        assert (group.dead, group.num_receivers) == (set(), 2)
        assert pid(group, 0) != first
        assert group.executor.places[group.replicas[0]].node == group.ranks[0].node  # type: ignore[attr-defined]
        assert await sampled(group) == [want[0].tokens] * 2
        for done in await asyncio.gather(*map(group.generate, REQUESTS)):
            assert set(done.versions) == {1}
        assert await group.executor.reads() >= set()

    told(tmp_path, story)
    assert "rollout replica 0 died; starting it again" in capfd.readouterr().out


@pytest.mark.parametrize("count", [1, 2])
def test_killed_while_idle_and_in_a_sync(tmp_path: Path, count: int) -> None:
    """Where it is the only one, too: nothing was being sampled."""

    async def story(group: RolloutGroup, edge: StreamShardingManager) -> None:
        (want,) = set(await sampled(group))
        os.kill(pid(group, count - 1), signal.SIGKILL)
        await edge.sync(1)
        await group.executor.call(group.replicas[0], "die_in_update")
        await edge.sync(2)
        assert group.restarts == ([2] if count == 1 else [1, 1])
        assert set(await sampled(group)) == {want}
        assert set((await group.generate(REQUESTS[0])).versions) == {2}

    told(tmp_path, story, count)


def test_the_last_one_s_death_names_how_it_died(tmp_path: Path) -> None:
    async def story(group: RolloutGroup, edge: StreamShardingManager) -> None:
        running = asyncio.ensure_future(group.generate(REQUESTS[-1]))
        await asyncio.sleep(0.2)
        killed = pid(group, 0)
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(
            ReplicaDied,
            match=rf"(?s)rollout replica 0 \(pid {killed}, node .* died in generate: .*log: ",
        ):
            await running
        for _ in range(MAX_RESTARTS):
            await group.pause(InFlight.DRAIN)
            await group.revive(InFlight.DRAIN)
            os.kill(pid(group, 0), signal.SIGKILL)
        await group.pause(InFlight.DRAIN)
        with pytest.raises(ReplicaDied, match="rollout replica 0 died 4 times"):
            await group.revive(InFlight.DRAIN)

    told(tmp_path, story, 1)


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_job_gives_the_numbers_of_an_undisturbed_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], how: signal.Signals
) -> None:
    write_inputs(tmp_path)
    write_tokenizer(write_toy(tmp_path / "toy"))
    given = ["train", "engine=toy", "rollout=toy", "algorithm=toy", "steps=12",
             "prompts_per_step=2",
             "samples_per_prompt=4", "sampling.max_tokens=64", "data.max_prompt_tokens=64",
             "executor=ray",
             "rollout.replicas=2", "ray.placement=disjoint", "engine.lr=0.1",
             "waits.heartbeat_s=1",
             f"model.path={tmp_path / 'toy'}",
             f"data.source={tmp_path / 'rows.jsonl'}",
             f"reward.target={tmp_path / 'reward.py'}:score"]  # fmt: skip
    assert main([*given, f"run_dir={tmp_path / 'one'}"]) == 0
    killer = threading.Thread(target=kill, args=(tmp_path / "two", how))
    killer.start()
    assert main([*given, f"run_dir={tmp_path / 'two'}"]) == 0
    killer.join()
    said = capfd.readouterr()
    assert "rollout replica 0 died; starting it again" in said.out
    assert (how == signal.SIGSTOP) == (
        "is stopped, by SIGSTOP or SIGTSTP; it is killed" in said.err
    )
    assert reproducible(tmp_path / "two") == reproducible(tmp_path / "one")


def kill(run_dir: Path, how: signal.Signals) -> None:
    """The first replica, once two steps are done."""
    log, end = run_dir / "metrics.jsonl", time.monotonic() + 60
    while time.monotonic() < end and not (log.is_file() and len(log.read_text().splitlines()) > 2):
        time.sleep(0.01)
    assert json.loads(log.read_text().splitlines()[-1])["step"] < 10
    found: Any = re.match(r"pid (\d+) on node", (run_dir / "logs" / "rollout-0.log").read_text())
    os.kill(int(found[1]), how)
