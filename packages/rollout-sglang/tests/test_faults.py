"""A process of the engine is killed: a named error within seconds, and a new start."""

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

from coupler.errors import ReplicaDied
from coupler.interfaces import InFlight, Memory, Named, Rank, Request
from coupler.testing.edge import Served
from coupler.testing.reference import TransformersReference

WITHIN_S = 30.0


def weights(reference: TransformersReference) -> Iterator[Named]:
    for name, tensor in reference.tensors.items():
        yield name, torch.from_numpy(tensor)


def scheduler(rollout: Any) -> int:
    """The process of the model worker."""
    return rollout.workers[0].pid


def manager(rollout: Any) -> int:
    """The process that holds SGLang's tokenizer manager."""
    return rollout.link.process.of.pid


@pytest.fixture
def fresh(one: Served, reference: TransformersReference) -> Served:
    """The replica, started again after it was killed."""

    async def revive() -> None:
        if not one.rollout.gate.is_set():
            await one.rollout.resume()
        await one.rollout.setup(Rank(seed=1))

    try:
        one.run(lambda: one.rollout.pause(InFlight.DRAIN))
        one.run(one.rollout.resume)
    except ReplicaDied:
        one.rollout.paused = None
        one.run(revive, deadline_s=400.0)
    one.push(weights(reference))
    return one


def died_within(served: Served, story: Callable[[], Any]) -> None:
    """``story`` kills a process and returns when, and what must fail then."""

    async def told() -> None:
        start, failing = await story()
        with pytest.raises(ReplicaDied, match="the SGLang engine of rollout replica 0 died"):
            await asyncio.wait_for(failing, WITHIN_S)
        assert time.monotonic() - start < WITHIN_S

    served.run(told)


def kill(pid: int) -> float:
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def test_a_manager_killed_while_idle(fresh: Served) -> None:
    async def story() -> Any:
        start = kill(manager(fresh.rollout))
        await asyncio.sleep(1)
        return start, fresh.rollout.pause(InFlight.DRAIN)

    died_within(fresh, story)


def test_a_worker_killed_while_it_samples(fresh: Served) -> None:
    async def story() -> Any:
        first = asyncio.ensure_future(fresh.rollout.generate(Request((5, 6), 240)))
        await asyncio.sleep(0.1)
        late = asyncio.ensure_future(fresh.rollout.generate(Request((5, 7), 240)))
        while len(fresh.rollout.running) < 2:
            await asyncio.sleep(0)
        start = kill(scheduler(fresh.rollout))
        with pytest.raises(ReplicaDied):
            await asyncio.wait_for(first, WITHIN_S)
        return start, late

    died_within(fresh, story)
    assert not fresh.rollout.running


def test_a_worker_killed_in_a_sync(fresh: Served, reference: TransformersReference) -> None:
    """The update fails by name, and the same replica takes the next one."""

    def slowly() -> Iterator[Named]:
        for i, named in enumerate(weights(reference)):
            if i == 5:
                kill(scheduler(fresh.rollout))
                time.sleep(1.0)
            yield named

    async def story() -> None:
        with pytest.raises((ReplicaDied, ExceptionGroup)) as caught:
            await fresh.edge.push(slowly())
        assert "the SGLang engine of rollout replica 0 died" in repr(caught.value)

    fresh.run(story)


def test_it_starts_again_and_samples_the_same(
    fresh: Served, reference: TransformersReference
) -> None:
    """Weights that slept do not come back by themselves."""
    request = Request((5, 6, 7), 12, seed=3)
    before = fresh.run(lambda: fresh.rollout.generate(request))

    async def asleep() -> None:
        await fresh.rollout.pause(InFlight.DRAIN)
        await fresh.rollout.sleep(frozenset(Memory))
        kill(manager(fresh.rollout))
        with pytest.raises(ReplicaDied):
            await fresh.rollout.wake(frozenset(Memory))
        await fresh.rollout.setup(Rank(seed=1))
        await fresh.rollout.resume()

    fresh.run(asleep, deadline_s=400.0)
    fresh.push(weights(reference))
    again = fresh.run(lambda: fresh.rollout.generate(request))
    assert again.tokens == before.tokens


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
    processes = [f"/proc/{pid}/cmdline" for pid in json.loads(line.removeprefix("processes"))]
    assert all(Path(path).read_bytes() for path in processes)

    owner.kill()
    end = time.monotonic() + WITHIN_S
    # Empty: it ended, unreaped.
    while any(Path(path).exists() and Path(path).read_bytes() for path in processes):
        assert time.monotonic() < end
        time.sleep(0.1)
    owner.wait(WITHIN_S)
