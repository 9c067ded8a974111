"""A worker that runs out of memory, as a job shows it; and roles with devices of their own, which never sleep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toy_run import ToyRun, small

from coupler.config.compose import compose
from coupler.errors import ConfigError, CouplerError
from coupler.executors.host import Failure
from coupler.interfaces import Completion, Memory, Request, SyncReceipt, WeightUpdate
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


@pytest.mark.parametrize(
    ("backends", "phase", "size"),
    [
        ({"engine": "test_memory:FullEngine"}, "train", 2),
        ({"rollout": "test_memory:FullSync"}, "sync", 3),
        ({"rollout": "test_memory:FullSampling"}, "sample", 4),
    ],
)
def test_the_phase_that_ran_out_of_memory_is_named(
    tmp_path: Path, backends: dict[str, str], phase: str, size: int
) -> None:
    with pytest.raises(CouplerError, match=rf"out of memory in phase {phase}: .*Tried to allocate {size} GiB") as error:
        ToyRun(tmp_path, small(steps=3), **backends).run()
    assert "try:  offload=true, a smaller engine.max_tokens_per_gpu" in str(error.value)


def test_a_failure_of_another_process_keeps_its_words() -> None:
    """Of whatever class it was there: its name reads as one of these two."""
    for raised in (MemoryError("4 GiB"), RuntimeError("CUDA out of memory. Tried to allocate 4 GiB")):
        error = Failure.of(raised).error("policy rank 0", "train", Path("/none"), [])
        assert isinstance(error, RuntimeError) and "out of memory" in str(error)


SLEPT: list[frozenset[Memory]] = []


class Sleeper(ToyRollout):
    async def sleep(self, what: frozenset[Memory]) -> None:
        SLEPT.append(what)


def test_devices_of_their_own_are_never_given_back(tmp_path: Path) -> None:
    """Roles that take no turns keep what they have; to ask for both is a contradiction, said before the start."""
    SLEPT.clear()
    ToyRun(tmp_path, small(steps=3), rollout="test_memory:Sleeper").run()
    assert not SLEPT
    needed = ["engine=toy", "rollout=toy", "algorithm=toy", "model.path=/m", "data.source=x.jsonl", "reward.target=a:b"]
    both = ["executor=ray", "ray.placement=disjoint", "offload=true"]
    with pytest.raises(ConfigError, match=r"offload=true needs ray\.placement=colocated: with devices of their own"):
        compose(Plugins.load(), [*needed, *both])
