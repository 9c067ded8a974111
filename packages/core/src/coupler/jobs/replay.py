"""``coupler replay``: one stage of a recorded step again, in this process; ``coupler export``: a checkpoint's model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

import numpy as np

from coupler import checkpoint, record
from coupler.batch import Batch
from coupler.config.compose import Composed
from coupler.errors import CouplerError
from coupler.interfaces import Output
from coupler.jobs.parts import Parts, export_whole
from coupler.metrics import values
from coupler.plugins.manager import Plugins
from coupler.trainer import of_steps
from coupler.workers import WorkerGroup


class Stage(StrEnum):
    ADVANTAGES = "advantages"  # on the controller, from rewards
    LOGPROBS = "logprobs"  # the policy's, against those of the rollout
    TRAIN = "train"  # loss, gradient and optimizer step


def replay(
    composed: Composed, plugins: Plugins, run_dir: Path, step: int, stage: Stage
) -> dict[str, tuple[float, float]]:
    """Run ``stage`` of ``step`` again; return each number as (recorded, now).

    Raises:
        CouplerError: the step was not recorded, or the weights that it started from were not kept.
    """
    batch, trained = record.read(run_dir / "record", step)
    parts = Parts(composed, plugins)
    if stage is Stage.ADVANTAGES:
        again = parts.algorithm().advantages(batch)["advantages"]
        return _compare(_describe(batch["advantages"], batch), _describe(again, batch))
    return asyncio.run(_on_the_engine(parts, run_dir, step, stage, batch, trained))


async def _on_the_engine(
    parts: Parts, run_dir: Path, step: int, stage: Stage, batch: Batch, trained: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    policy = await _policy(parts, run_dir, step - 1, trains=stage is Stage.TRAIN)
    if stage is Stage.LOGPROBS:
        now = (await policy.forward(batch, (Output("logprobs"),)))["logprobs"]
        return _compare(_describe(batch["rollout_logprobs"], batch), _describe(now, batch))
    done = await policy.train(batch, parts.config.optimizer_steps_per_batch, step - 1)
    return _compare(trained, values({**done.metrics, **of_steps(done.steps)}))


def export_run(composed: Composed, plugins: Plugins, run_dir: Path, step: int | None, out: Path) -> int:
    """Write the policy of a run's checkpoint, the last whole one if ``step`` is None, to ``out``; return its step.

    Raises:
        CouplerError: there is no such checkpoint, or ``out`` exists.
    """
    if out.exists():
        raise CouplerError(f"--out {out} exists already; nothing was written.\n  try:  another folder")
    if step is None:
        found, _ = checkpoint.newest(run_dir / "checkpoints")
        if not found:
            raise CouplerError(f"{run_dir} has no whole checkpoint.\n  try:  a run folder with checkpoints/step_*")
        step = found.step
    parts = Parts(composed, plugins)

    async def write() -> None:
        policy = await _policy(parts, run_dir, step, trains=False)
        out.parent.mkdir(parents=True, exist_ok=True)
        await export_whole(policy, out, Path(parts.model.path))

    asyncio.run(write())
    return step


async def _policy(parts: Parts, run_dir: Path, step: int, *, trains: bool) -> WorkerGroup:
    """The policy as it was after ``step``."""
    policy = parts.engine("policy", trains=trains)
    await policy.setup()
    if step == 0:
        return policy
    folder = run_dir / "checkpoints" / f"step_{step}"
    problem = checkpoint.check(folder)
    if problem:
        kept = ", ".join(p.name for p in checkpoint.folders(folder.parent)) or "none"
        raise CouplerError(f"the weights after step {step} are not whole in {folder}: {problem}.\n  kept:  {kept}")
    found = checkpoint.read(folder)
    parts_needed = found.manifest["parts"] if trains else ["params"]
    await replace(found, manifest={**found.manifest, "parts": parts_needed}).restore("policy", policy)
    return policy


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
