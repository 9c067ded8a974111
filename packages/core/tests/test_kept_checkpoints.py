"""Which checkpoints stay: the last ones, the best ones, and the last healthy one."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from math import nan
from pathlib import Path

import pytest
from test_outputs import policy

from coupler.config.schema import CheckpointConfig
from coupler.loop.state import State
from coupler.run.checkpoint import Checkpoints, newest


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
    saves = [(step, {}, well) for step, well in enumerate(healthy, 1)]
    assert kept_of(tmp_path, CheckpointConfig(keep_last=1), saves) == kept


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("values", [(2, 1, nan, 3), (nan, 2, 3, 1), (3, nan, 1, 2), (1, 3, 2, nan)])
def test_a_metric_that_is_no_number_is_not_the_best(
    values: tuple[float, ...], lower: bool, tmp_path: Path
) -> None:
    """NaN is neither above nor below another number, so that no order has a place for
    it.
    """
    settings = CheckpointConfig(keep_last=1, keep_best=1, best_metric="loss", lower_is_better=lower)
    saves = [(step, {"loss": value}, True) for step, value in enumerate(values, 1)]
    best = values.index(1 if lower else 3) + 1
    assert kept_of(tmp_path, settings, saves) == {"step_4", f"step_{best}"}


def test_what_is_saved_stays_where_a_later_checkpoint_was_damaged(tmp_path: Path) -> None:
    """A run goes on from the last whole checkpoint, and the damaged ones after it lie
    there still.
    """
    settings = CheckpointConfig(keep_last=1)
    assert kept_of(tmp_path, settings, [(4, {}, True)]) == {"step_4"}
    state = tmp_path / "checkpoints" / "step_4" / "state.json"
    state.write_text(state.read_text() + " ")
    assert kept_of(tmp_path, settings, [(2, {}, True), (3, {}, True)]) == {"step_3", "step_4"}
    found, skipped = newest(tmp_path / "checkpoints")
    assert found and found.step == 3 and "step_4" in skipped[0]


def kept_of(
    folder: Path, settings: CheckpointConfig, saves: list[tuple[int, dict[str, float], bool]]
) -> set[str]:
    """Save, and return the names of the checkpoints that are there then."""
    group = policy(folder)
    checkpoints = Checkpoints(folder / "checkpoints", settings, {"data": "d"})

    async def write() -> None:
        async with checkpoints:
            for step, values, well in saves:
                await checkpoints.save(
                    step,
                    {"policy": group},
                    State({}),
                    hold=lambda role: nullcontext(),
                    values=values,
                    healthy=well,
                )

    asyncio.run(write())
    return {path.name for path in checkpoints.folder.glob("step_*")}
