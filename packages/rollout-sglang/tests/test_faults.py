"""A process of the engine is killed: a named error within seconds, a new start, and a
rollout that goes on.
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

import pytest
import torch

from coupler.config.schema import SyncConfig
from coupler.errors import ReplicaDied
from coupler.executors import Local
from coupler.executors.waits import Waits
from coupler.interfaces import InFlight, Memory, Model, Named, Rank, Request
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

WITHIN_S = 30.0


def children(pid: int) -> list[int]:
    listed = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(pid) for pids in listed for pid in pids.split()]


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except FileNotFoundError:
        return ""


def process(rollout: Any, name: str) -> int:
    """The engine's process of this name. The manager started the others."""
    manager = rollout.link.process.of.pid
    if name == "manager":
        return manager
    (found,) = (pid for pid in children(manager) if title(pid).startswith(f"sglang::{name}"))
    return found


def kill(pid: int) -> float:
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def died_within(served: Served, story: Callable[[], Any]) -> None:
    """``story`` kills a process and returns when, and what must fail then."""

    async def told() -> None:
        start, failing = await story()
        with pytest.raises(ReplicaDied, match="the SGLang engine of rollout replica 0 died"):
            await asyncio.wait_for(failing, WITHIN_S)
        assert time.monotonic() - start < WITHIN_S

    served.run(told)


def test_only_schedulers_are_started(served: Served) -> None:
    titles = [title(pid) for pid in children(process(served.rollout, "manager"))]
    started = [each for each in titles if "resource_tracker" not in each]
    assert len(started) == 1 and started[0].startswith("sglang::scheduler"), titles


def test_killed_while_idle(served: Served) -> None:
    async def noticed() -> None:
        while True:
            await served.rollout.pause(InFlight.DRAIN)
            await asyncio.sleep(0.1)

    async def story() -> Any:
        return kill(process(served.rollout, "manager")), noticed()

    died_within(served, story)


def test_killed_while_it_samples(served: Served) -> None:
    """One request has some tokens by then, and the prompt of the other has just
    entered.
    """

    async def story() -> Any:
        first = asyncio.ensure_future(served.rollout.generate(Request((5, 6), 240)))
        await asyncio.sleep(0.1)
        late = asyncio.ensure_future(served.rollout.generate(Request((5, *range(200)), 40)))
        while len(served.rollout.running) < 2:
            await asyncio.sleep(0)
        start = kill(process(served.rollout, "scheduler"))
        with pytest.raises(ReplicaDied):
            await asyncio.wait_for(first, WITHIN_S)
        return start, late

    died_within(served, story)
    assert not served.rollout.running


def group_of_one(reference: TransformersReference) -> tuple[RolloutGroup, StreamShardingManager]:
    """A group of one replica, and its edge from an engine that trains an adapter."""
    plugins, executor = Plugins.load(), Local(inline=True, waits=Waits(300.0, 60.0))
    rollout, engine = plugins.get("rollout", "sglang"), plugins.get("engine", "fsdp")
    model, ranks = Model(str(reference.folder)), [Rank(seed=1)]

    sampled = configured(rollout.config, {"dtype": "fp32", "max_lora_rank": 4})
    trained = configured(engine.config, {"dtype": "fp32", "lora_rank": 4})
    group = RolloutGroup(executor, RolloutSpec(rollout.target, sampled, model), ranks)
    policy = EngineGroup(executor, WorkerSpec("policy", engine.target, trained, model, None), ranks)
    edge = StreamShardingManager(
        SyncConfig(deadline_s=60.0),
        engine=policy,
        rollouts=group,
        weight_format="lora",
        transport=plugins.get("transport", "tcp").target,
        probe_prompt=(5, 6, 7),
        temperature=1.0,
        residency=Residency({}, shared=False),
        in_flight=InFlight.DRAIN,
    )
    return group, edge


def kill_at_start() -> None:
    """Wait for a process that an engine starts, and kill it.

    Where others work beside it, SGLang's imports before that take more than 30 s.
    """
    until = time.monotonic() + 4 * WITHIN_S
    while time.monotonic() < until:
        for manager in children(os.getpid()):
            if "coupler_rollout_sglang.host" in title(manager):
                for pid in children(manager):
                    if "spawn_main" in title(pid):
                        kill(pid)
                        return
        time.sleep(0.05)
    raise TimeoutError("no engine started a process")


@pytest.mark.slow
def test_a_group_goes_on_when_its_replica_dies_in_a_sync_in_a_wake_and_at_its_start(
    kernels: None, reference: TransformersReference, capsys: pytest.CaptureFixture[str]
) -> None:
    """It starts again, gets the weights and the adapter, and samples what it sampled
    before.
    """
    group, edge = group_of_one(reference)
    rollout, request = group.replicas[0].of, Request((5, 6, 7), 12, seed=3)

    def dying(adapter: Iterator[Named]) -> Iterator[Named]:
        for i, named in enumerate(adapter):
            if i == 5:
                kill(process(rollout, "scheduler"))
                time.sleep(1.0)
            yield named

    async def story() -> None:
        await edge.engine.setup()
        await edge.setup()
        engine = edge.engine.ranks[0].of.engine
        with torch.no_grad():
            for tensor in engine.adapter.parameters().values():
                tensor.add_(0.05)
        await edge.sync(0)
        before = await group.generate(request)

        whole, pushes = engine.adapter_weights, []

        def adapter_weights() -> Iterator[Named]:
            pushes.append(time.monotonic())
            return whole() if len(pushes) > 1 else dying(whole())

        engine.adapter_weights = adapter_weights
        synced = await edge.sync(1)
        assert len(pushes) == 2
        assert synced["sync/tensors"].value == len(reference.tensors) + 28
        done = await group.generate(request)
        assert (done.tokens, set(done.versions)) == (before.tokens, {1})

        await group.pause(InFlight.DRAIN)
        await group.tell("sleep", frozenset(Memory))
        kill(process(rollout, "manager"))
        await asyncio.wait_for(group.tell("wake", frozenset({Memory.WEIGHTS})), WITHIN_S)
        assert group.dead == {0}
        killed = asyncio.create_task(asyncio.to_thread(kill_at_start))
        await edge.sync(2)
        await killed
        assert (await edge.probe())["sync/probe"].value < 1e-3
        done = await group.generate(request)
        assert (done.tokens, set(done.versions)) == (before.tokens, {2})

    try:
        asyncio.run(story())
    finally:
        rollout.close()
    assert capsys.readouterr().out.count("rollout replica 0 died; starting it again") == 3


OWNER = """
import asyncio, json, sys
from coupler.interfaces import Model, Rank
from coupler_rollout_sglang.config import SGLangConfig
from coupler_rollout_sglang.rollout import SGLangRollout

async def start():
    rollout = SGLangRollout(SGLangConfig(), Model(sys.argv[1]))
    await rollout.setup(Rank(seed=1))
    pids = [rollout.link.process.of.pid, *(worker.pid for worker in rollout.workers)]
    print("processes", json.dumps(pids), flush=True)
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
    line = next(line for line in owner.stdout if line.startswith("processes"))
    processes = json.loads(line.removeprefix("processes"))
    assert all(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes)

    owner.kill()
    await_end(processes, WITHIN_S)
    owner.wait(WITHIN_S)
