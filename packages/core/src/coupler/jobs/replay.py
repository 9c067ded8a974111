"""Look into a run folder.

``coupler replay`` runs one stage of a recorded step again, in this process. ``coupler
export`` writes the model of a checkpoint.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path

import numpy as np

from coupler.batch import Batch
from coupler.batch.columns import PART
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
from coupler.run.format import number_of
from coupler.run.model_card import model_card
from coupler.run.run_folder import find_run
from coupler.run.session import export_whole
from coupler.system.files import disk_errors_named
from coupler.system.log import get_logger

log = get_logger(__name__)


class Stage(StrEnum):
    """Names the stages of a step that can run again."""

    # On the controller, from rewards.
    ADVANTAGES = "advantages"
    # The policy's log-probs, against those of the rollout.
    LOGPROBS = "logprobs"
    # The values of the critic.
    VALUES = "values"
    # Loss, gradient and optimizer step of each role whose turn it was.
    TRAIN = "train"


# A role, its output, and the column that holds what the run had of it.
AGAIN = {
    Stage.LOGPROBS: ("policy", Output("logprobs"), "rollout_logprobs"),
    Stage.VALUES: ("critic", Output("values"), "values"),
}


def replay(
    composed: Composed, plugins: Plugins, run_dir: Path, step: int, stage: Stage
) -> dict[str, tuple[float, float]]:
    """Run ``stage`` of ``step`` again, and return each number as (recorded, now).

    Raises:
        CouplerError: the step was not recorded, or the weights that it started from
            were not kept.
    """
    with disk_errors_named(run_dir):
        batch, trained = step_record.read(run_dir / "record", step, find_run(run_dir))
        builder = Builder(composed, plugins)
        with closing(builder.executor):
            return _replay(builder, run_dir, step, stage, batch, trained)


def _replay(
    builder: Builder,
    run_dir: Path,
    step: int,
    stage: Stage,
    batch: Batch,
    trained: Mapping[str, float],
) -> dict[str, tuple[float, float]]:
    if missing := [name for name in ("tokens", "loss_mask", "advantages") if not batch.has(name)]:
        raise CouplerError(
            f"the record of step {step} in {run_dir} is damaged: it has no {', '.join(missing)}."
        )

    if stage is Stage.ADVANTAGES:
        again = builder.algorithm.advantages(batch)["advantages"]
        return _compare(_describe(batch["advantages"], batch), _describe(again, batch))
    return asyncio.run(_on_the_engine(builder, run_dir, step, stage, batch, trained))


async def _on_the_engine(
    builder: Builder,
    run_dir: Path,
    step: int,
    stage: Stage,
    batch: Batch,
    trained: Mapping[str, float],
) -> dict[str, tuple[float, float]]:
    recorded = step_record.steps(run_dir / "record")
    _check_weights(run_dir, step - 1, partial(_another_replay, recorded))
    if stage is Stage.TRAIN:
        return _compare(trained, values(await _train(builder, run_dir, step, batch)))

    role, output, column = AGAIN[stage]
    if not batch.has(column):
        raise CouplerError(
            f"--stage {stage} needs a run with a critic; "
            f"algorithm={builder.config.algorithm.name} has none."
        )

    group = await _role(builder, role, run_dir, step - 1, trains=False)
    now = await _forward(group, batch, output)
    return _compare(_describe(batch[column], batch), _describe(now, batch))


async def _forward(group: EngineGroup, batch: Batch, output: Output) -> np.ndarray:
    """Compute an output of all rows, in the parts that the run took."""
    part = batch[PART] if batch.has(PART) else np.zeros(len(batch))
    rows = [np.flatnonzero(part == number) for number in np.unique(part)]
    answers = [await group.forward(batch.take(some), (output,)) for some in rows]
    return np.concatenate([answer[output.name] for answer in answers])


async def _train(builder: Builder, run_dir: Path, step: int, batch: Batch) -> Metrics:
    """Train one role after the other, so that one is in memory at a time."""
    roles = ("policy", "critic") if builder.algorithm.critic else ("policy",)
    found: Metrics = {}
    for role, turn in turns_of(builder.config, roles, step, batch, step - 1).items():
        group = await _role(builder, role, run_dir, step - 1, trains=True)
        metrics = await group.train(turn.batch, turn.num_steps, turn.version, turn.epochs)
        found |= of_role(role, metrics)
    return found


def export_run(
    composed: Composed, plugins: Plugins, run_dir: Path, step: int | None, out: Path | None
) -> tuple[Path, int]:
    """Write the policy of a run's checkpoint, and return the folder and the step.

    Args:
        step: the step of the checkpoint. None is the last whole one.
        out: the folder. None is ``export_step_N`` in that of the run.

    Raises:
        CouplerError: there is no such checkpoint, or the folder exists.
    """
    with disk_errors_named(out or run_dir):
        if step is None:
            step = last_step(run_dir)
        else:
            _check_weights(run_dir, step, _another_export)

        out = out or run_dir / f"export_step_{step}"
        if os.path.lexists(out):
            raise CouplerError(
                f"--out {out} exists already; nothing was written.\n  try:  another folder"
            )
        builder = Builder(composed, plugins)
        with closing(builder.executor):
            asyncio.run(_write(builder, run_dir, step, out))
    return out, step


async def _write(builder: Builder, run_dir: Path, step: int, out: Path) -> None:
    policy = await _role(builder, "policy", run_dir, step, trains=False)
    config, plugins = builder.composed.config, builder.plugins

    card = model_card(config, plugins, run_dir, policy.spec, step)
    await export_whole(policy, out, Path(builder.model.path), card)


def last_step(run_dir: Path) -> int:
    """Return the step of the newest whole checkpoint.

    Raises:
        CouplerError: there is none.
    """
    found, skipped = checkpoint.newest(run_dir / "checkpoints", find_run(run_dir))
    for line in skipped:
        log.info(f"checkpoint skipped: {line}")
    if not found:
        raise CouplerError(
            f"{run_dir} has no whole checkpoint.\n  try:  a run folder with checkpoints/step_*"
        )
    return found.step


async def _role(
    builder: Builder, role: str, run_dir: Path, step: int, *, trains: bool
) -> EngineGroup:
    """Return the policy or the critic as it was after ``step``.

    There is a checkpoint of that step, or it is 0, which is the start.
    """
    if role == "critic":
        group = builder.critic(builder.critic_model())
    else:
        group = builder.engine(role, trains=trains)
    await group.setup()

    if step:
        found = checkpoint.read(_checkpoint(run_dir, step))
        parts_needed = found.manifest["parts"] if trains else ["params"]
        found = replace(found, manifest={**found.manifest, "parts": parts_needed})
        await found.restore(role, group)
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
    problem = "none was made then, or it was deleted since"
    if folder.exists():
        problem = checkpoint.check(folder, find_run(run_dir))

    if step and problem:
        kept = sorted(number_of(path) or 0 for path in checkpoint.folders(folder.parent))
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
    """Describe a token column by numbers, over all valid tokens and by sequence."""
    mask = batch["loss_mask"]
    column = np.where(mask, column, 0)
    by_sequence = batch.sum_by_sequence(column)
    return {
        "sum": float(column[mask].sum()),
        "abs_max": float(np.abs(column[mask]).max(initial=0)),
        **{f"sequence {i}": float(total) for i, total in enumerate(by_sequence)},
    }


def _compare(then: Mapping[str, float], now: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    return {name: (then[name], now[name]) for name in then if name in now}
