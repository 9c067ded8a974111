"""``coupler replay``: one stage of a recorded step again, in this process; ``coupler export``: a checkpoint's model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path

import numpy as np

from coupler.batch import Batch
from coupler.config.compose import Composed
from coupler.errors import CouplerError
from coupler.interfaces import Output
from coupler.jobs.build import Builder
from coupler.loop.engine_group import EngineGroup
from coupler.loop.step_metrics import of_role
from coupler.loop.turns import turns_of
from coupler.metrics import Metrics, values
from coupler.plugins.manager import Plugins
from coupler.run import checkpoint, step_record
from coupler.run.session import export_whole
from coupler.system.log import get_logger

log = get_logger(__name__)


class Stage(StrEnum):
    ADVANTAGES = "advantages"  # on the controller, from rewards
    LOGPROBS = "logprobs"  # the policy's, against those of the rollout
    VALUES = "values"  # the critic's
    TRAIN = "train"  # loss, gradient and optimizer step, of each role whose turn it was


AGAIN = {  # role, its output, and the column that has it of the run
    Stage.LOGPROBS: ("policy", Output("logprobs"), "rollout_logprobs"),
    Stage.VALUES: ("critic", Output("values"), "values"),
}


def replay(
    composed: Composed, plugins: Plugins, run_dir: Path, step: int, stage: Stage
) -> dict[str, tuple[float, float]]:
    """Run ``stage`` of ``step`` again; return each number as (recorded, now).

    Raises:
        CouplerError: the step was not recorded, or the weights that it started from were not kept.
    """
    batch, trained = step_record.read(run_dir / "record", step)
    builder = Builder(composed, plugins)
    if stage is Stage.ADVANTAGES:
        again = builder.algorithm.advantages(batch)["advantages"]
        return _compare(_describe(batch["advantages"], batch), _describe(again, batch))
    return asyncio.run(_on_the_engine(builder, run_dir, step, stage, batch, trained))


async def _on_the_engine(
    builder: Builder, run_dir: Path, step: int, stage: Stage, batch: Batch, trained: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    _check_weights(run_dir, step - 1, partial(_another_replay, step_record.steps(run_dir / "record")))
    if stage is Stage.TRAIN:
        return _compare(trained, values(await _train(builder, run_dir, step, batch)))
    role, output, column = AGAIN[stage]
    if not batch.has(column):
        raise CouplerError(
            f"--stage {stage} needs a run with a critic; algorithm={builder.config.algorithm.name} has none."
        )
    group = await _role(builder, role, run_dir, step - 1, trains=False)
    now = (await group.forward(batch, (output,)))[output.name]
    return _compare(_describe(batch[column], batch), _describe(now, batch))


async def _train(builder: Builder, run_dir: Path, step: int, batch: Batch) -> Metrics:
    """Train one role after the other, so that one is in memory at a time."""
    roles = ("policy", "critic") if builder.algorithm.critic else ("policy",)
    found: Metrics = {}
    for role, turn in turns_of(builder.config, roles, step, batch, step - 1).items():
        group = await _role(builder, role, run_dir, step - 1, trains=True)
        found |= of_role(role, await group.train(turn.batch, turn.num_steps, turn.version, turn.epochs))
    return found


def export_run(composed: Composed, plugins: Plugins, run_dir: Path, step: int | None, out: Path) -> int:
    """Write the policy of a run's checkpoint, the last whole one if ``step`` is None, to ``out``; return its step.

    Raises:
        CouplerError: there is no such checkpoint, or ``out`` exists.
    """
    if out.exists():
        raise CouplerError(f"--out {out} exists already; nothing was written.\n  try:  another folder")
    if step is None:
        found, skipped = checkpoint.newest(run_dir / "checkpoints")
        for line in skipped:
            log.info(f"checkpoint skipped: {line}")
        if not found:
            raise CouplerError(f"{run_dir} has no whole checkpoint.\n  try:  a run folder with checkpoints/step_*")
        step = found.step
    else:
        _check_weights(run_dir, step, _another_export)
    builder = Builder(composed, plugins)

    async def write() -> None:
        policy = await _role(builder, "policy", run_dir, step, trains=False)
        await export_whole(policy, out, Path(builder.model.path))

    asyncio.run(write())
    return step


async def _role(builder: Builder, role: str, run_dir: Path, step: int, *, trains: bool) -> EngineGroup:
    """The policy or the critic as it was after ``step``, of which there is a checkpoint; 0 is the start."""
    group = builder.critic(builder.critic_model()) if role == "critic" else builder.engine(role, trains=trains)
    await group.setup()
    if step:
        found = checkpoint.read(_checkpoint(run_dir, step))
        parts_needed = found.manifest["parts"] if trains else ["params"]
        await replace(found, manifest={**found.manifest, "parts": parts_needed}).restore(role, group)
    return group


def _checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step}"


def _check_weights(run_dir: Path, step: int, fix: Callable[[list[int]], str]) -> None:
    """Make sure, before anything is loaded, that the weights after ``step`` were kept.

    Args:
        fix: what to try instead, given the steps after which weights were.

    Raises:
        CouplerError: they were not.
    """
    folder = _checkpoint(run_dir, step)
    problem = checkpoint.check(folder) if folder.exists() else "none was made then, or it was deleted since"
    if step and problem:
        kept = sorted(int(path.name.removeprefix("step_")) for path in checkpoint.folders(folder.parent))
        raise CouplerError(
            f"the weights after step {step} are not whole in {folder}: {problem}.\n"
            f"  kept:  {_either([f'step_{at}' for at in kept]) or 'none'}\n  try:   {fix(kept)}"
        )


def _another_export(kept: list[int]) -> str:
    return f"--step {_either(kept)}" if kept else "a run folder with checkpoints/step_*"


def _another_replay(recorded: list[int], kept: list[int]) -> str:
    possible = [step for step in recorded if step - 1 in (0, *kept)]
    instead = f"--step {_either(possible)}, or " if possible else ""
    return (
        f"{instead}--stage advantages, which takes no weights; "
        "a run with checkpoint.every_steps=1 checkpoint.keep_last=0 keeps those of every step"
    )


def _either(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def _describe(column: np.ndarray, batch: Batch) -> dict[str, float]:
    """A token column as numbers that show where it differs: over all valid tokens, and by sequence."""
    mask = batch["loss_mask"]
    column = np.where(mask, column, 0)
    by_sequence = batch.sum_by_sequence(column)
    return {
        "sum": float(column[mask].sum()), "abs_max": float(np.abs(column[mask]).max(initial=0)),
        **{f"sequence {i}": float(total) for i, total in enumerate(by_sequence)},
    }  # fmt: skip


def _compare(then: Mapping[str, float], now: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    return {name: (then[name], now[name]) for name in then if name in now}
