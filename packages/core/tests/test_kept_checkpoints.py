"""Which checkpoints stay: the last ones, the best ones, and the last healthy one."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path

import pytest
from test_outputs import policy

from coupler.config.schema import CheckpointConfig
from coupler.loop.state import State
from coupler.run.checkpoint import Checkpoints


@pytest.mark.parametrize(
    ("healthy", "kept"),
    [
        ([True, True, True, True], {"step_4"}),
        ([True, True, False, False], {"step_2", "step_4"}),
        ([True, False, True, False], {"step_3", "step_4"}),
        ([False, False, False, False], {"step_4"}),
    ],
)
def test_the_last_healthy_checkpoint_stays(
    healthy: list[bool], kept: set[str], tmp_path: Path
) -> None:
    """A run whose gradients are no longer finite keeps what it can go back to."""
    group, folder = policy(tmp_path), tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, CheckpointConfig(keep_last=1), {"data": "d"})

    async def write() -> None:
        async with checkpoints:
            for step, well in enumerate(healthy, 1):
                await checkpoints.save(
                    step,
                    {"policy": group},
                    State({}),
                    hold=lambda role: nullcontext(),
                    values={},
                    healthy=well,
                )

    asyncio.run(write())
    assert {path.name for path in folder.glob("step_*")} == kept
