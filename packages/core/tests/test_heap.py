"""What a step leaves in cycles is freed at its end."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from toy_run import small

from coupler.config.schema import CheckpointConfig
from coupler.loop.state import State
from coupler.metrics import Metrics
from coupler.run.checkpoint import Checkpoints
from coupler.run.saving import Saving
from coupler.system.garbage import heap_set_aside


class Linked:
    """Holds itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


class Untrained:
    """A trainer that no step has changed."""

    healthy = True

    def state(self) -> State:
        return State({})

    def restore(self, state: State, *, reset_data: bool = False) -> None:
        raise AssertionError("nothing is restored")

    def start_at(self, step: int) -> None:
        raise AssertionError("nothing is restored")


def test_a_step_frees_what_it_left_in_cycles(tmp_path: Path) -> None:
    left: list[weakref.ref[Linked]] = []

    async def log(step: int, metrics: Metrics) -> dict[str, float]:
        left.append(weakref.ref(Linked()))
        return {}

    async def steps() -> list[Any]:
        folder = tmp_path / "checkpoints"
        async with Checkpoints(folder, CheckpointConfig(), {"data": "d"}) as checkpoints:
            config = small(steps=4, run_dir=str(tmp_path))
            saving = Saving(config, checkpoints, {}, Untrained(), log, lambda _: nullcontext())
            with heap_set_aside():
                for step in (1, 2):
                    await saving.after(step, {})
                return [ref() for ref in left]

    assert asyncio.run(steps()) == [None, None]


def test_the_collector_is_as_it_was_afterwards() -> None:
    before = gc.get_threshold()
    with heap_set_aside():
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() > before
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
