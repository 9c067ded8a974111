"""A worker that runs out of memory, as a job shows it; and roles with devices of their
own, which never sleep.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from toy_run import ToyRun, small

from coupler.batch import Batch
from coupler.config.compose import compose
from coupler.config.schema import Offload
from coupler.errors import ConfigError, CouplerError, ReplicaDied
from coupler.executors.host import Failure
from coupler.interfaces import (
    Completion,
    Layout,
    Memory,
    Output,
    Parts,
    Rank,
    Request,
    StepResult,
    SyncReceipt,
    WeightUpdate,
)
from coupler.plugins.manager import Plugins
from coupler.testing.toy import ToyEngine, ToyRollout


class FullEngine(ToyEngine):
    def step(self) -> Any:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")


class FullSync(ToyRollout):
    async def update(self, update: WeightUpdate) -> SyncReceipt:
        if update.version == 1:
            raise MemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        return await super().update(update)


class FullSampling(ToyRollout):
    async def generate(self, request: Request) -> Completion:
        if self.version == 1:
            raise MemoryError("CUDA out of memory. Tried to allocate 4 GiB")
        return await super().generate(request)


class FullStart(ToyRollout):
    async def setup(self, rank: Rank) -> int:
        raise MemoryError("CUDA out of memory. Tried to allocate 5 GiB")


@pytest.mark.parametrize(
    ("backends", "phase", "size"),
    [
        ({"rollout": "test_memory:FullStart"}, "start_rollout", 5),
        ({"engine": "test_memory:FullEngine"}, "train", 2),
        ({"rollout": "test_memory:FullSync"}, "sync", 3),
        ({"rollout": "test_memory:FullSampling"}, "sample", 4),
    ],
)
def test_the_phase_that_ran_out_of_memory_is_named(
    tmp_path: Path, backends: dict[str, str], phase: str, size: int
) -> None:
    with pytest.raises(
        CouplerError, match=rf"out of memory in phase {phase}: .*Tried to allocate {size} GiB"
    ) as error:
        ToyRun(tmp_path, small(steps=3), **backends).run()
    assert "try:  offload=true, a smaller engine.max_tokens_per_gpu" in str(error.value)


def test_a_failure_of_another_process_keeps_its_words() -> None:
    """Of whatever class it was there: its name reads as one of these two."""
    for raised in (
        MemoryError("4 GiB"),
        RuntimeError("CUDA out of memory. Tried to allocate 4 GiB"),
    ):
        error = Failure.of(raised).error("policy rank 0", "train", Path("/none"), [])
        assert isinstance(error, RuntimeError) and "out of memory" in str(error)


HELD: dict[str, set[str]] = {"engine": set(), "rollout": set()}
seen: list[str] = []


def held(what: str) -> None:
    """Note what both sides hold while ``what`` happens."""
    parts = [f"{side} {', '.join(sorted(own)) or 'nothing'}" for side, own in HELD.items()]
    seen.append(f"{what}: {'; '.join(parts)}")


class OffEngine(ToyEngine):
    """Can give its memory back, which it notes."""

    def setup(self, rank: Rank) -> Layout:
        HELD["engine"] |= {"params", "grads", "optimizer"}
        held("engine starts")
        return super().setup(rank)

    def forward(self, batch: Batch, want: tuple[Output, ...]) -> Batch:
        held("compared")
        return super().forward(batch, want)

    def step(self) -> StepResult:
        held("trained")
        return super().step()

    def offload(self, what: Parts) -> None:
        HELD["engine"] -= what

    def onload(self, what: Parts) -> None:
        HELD["engine"] |= what


class OffRollout(ToyRollout):
    """The same; it dies of version 1, once."""

    async def setup(self, rank: Rank) -> int:
        HELD["rollout"] |= {"weights", "kv_cache"}
        held("rollout starts")
        return await super().setup(rank)

    async def generate(self, request: Request) -> Completion:
        held("sampled")
        return await super().generate(request)

    async def update(self, update: WeightUpdate) -> SyncReceipt:
        held("pushed")
        if update.version == 1 and not update.attempt:
            raise ReplicaDied("it died.")
        return await super().update(update)

    async def sleep(self, what: frozenset[Memory]) -> None:
        HELD["rollout"] -= what

    async def wake(self, what: frozenset[Memory]) -> None:
        await asyncio.sleep(0.001)  # meanwhile others run
        HELD["rollout"] |= what


def test_on_a_shared_device_no_phase_has_more_than_its_turn(tmp_path: Path) -> None:
    """A rollout starts, and is started again, with the device to itself; nothing is
    ever beside a cache.
    """
    run = ToyRun(
        tmp_path,
        small(steps=2, offload=Offload.TRUE),
        engine="test_memory:OffEngine",
        rollout="test_memory:OffRollout",
        transport="coupler.builtin.transports.torch.tcp:TcpTransport",
    )
    run.run()
    engine, alone = "grads, optimizer, params", "engine nothing; rollout kv_cache, weights"
    pushed, compared = ("engine params; rollout weights",) * 2
    proof = [f"pushed: {pushed}", f"sampled: {alone}", f"compared: {compared}"]
    rows, trained = [f"sampled: {alone}"] * 16, f"trained: engine {engine}; rollout nothing"
    assert seen == [
        *(
            f"engine starts: engine {engine}; rollout nothing",
            f"rollout starts: {alone}",
            *proof,
            *proof,
        ),
        *(*rows, trained, f"pushed: {pushed}", f"rollout starts: {alone}", f"pushed: {pushed}"),
        *(*rows, trained, f"pushed: {pushed}"),
    ]
    assert list(run.residency.ledger) == [
        "start_policy",
        "start_rollout",
        "prove",
        "sample",
        "train",
        "sync",
    ]


SLEPT: list[frozenset[Memory]] = []


class Sleeper(ToyRollout):
    async def sleep(self, what: frozenset[Memory]) -> None:
        SLEPT.append(what)


def test_devices_of_their_own_are_never_given_back(tmp_path: Path) -> None:
    """Roles that take no turns keep what they have; to ask for both is a contradiction,
    said before the start.
    """
    SLEPT.clear()
    ToyRun(tmp_path, small(steps=3), rollout="test_memory:Sleeper").run()
    assert not SLEPT
    needed = [
        "engine=toy",
        "rollout=toy",
        "algorithm=toy",
        "model.path=/m",
        "data.source=x.jsonl",
        "reward.target=a:b",
    ]
    both = ["executor=ray", "ray.placement=disjoint", "offload=true"]
    with pytest.raises(
        ConfigError, match=r"offload=true needs ray\.placement=colocated: with devices of their own"
    ):
        compose(Plugins.load(), [*needed, *both])
