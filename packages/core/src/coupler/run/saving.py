"""What a job does with checkpoints: one after the steps that are due, and after the last."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from coupler.config.schema import RunConfig
from coupler.loop.engine_group import EngineGroup
from coupler.loop.state import State
from coupler.metrics import Metrics
from coupler.run.checkpoint import Checkpoints
from coupler.system.files import writing


class Resumable(Protocol):
    """A trainer, as checkpoints see it."""

    @property
    def healthy(self) -> bool: ...

    def state(self) -> State: ...

    def restore(self, state: State, *, reset_data: bool = False) -> None: ...

    def start_at(self, step: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Saving:
    """Called after each step: logs it, then saves the trained ``roles`` and the trainer if a checkpoint is due."""

    config: RunConfig
    checkpoints: Checkpoints
    roles: Mapping[str, EngineGroup]
    trainer: Resumable
    log: Callable[[int, Metrics], Awaitable[Mapping[str, float]]]
    hold: Callable[[str], AbstractAsyncContextManager[Any]]  # a role's state is on its device within it

    async def after(self, step: int, metrics: Metrics) -> None:
        """Raise what made the last save fail, at the first step after it."""
        values = await self.log(step, metrics)
        if self.checkpoints.ended:
            await self.checkpoints.settle()
        if step and (step == self.config.steps or due(self.config.checkpoint.every_steps, step)):
            for role in self.roles:  # before there is a checkpoint that would make a run with this export complete
                _discard(export_folder(self.config.run_dir, role))
            healthy, state = self.trainer.healthy, self.trainer.state()
            await self.checkpoints.save(step, self.roles, state, hold=self.hold, values=values, healthy=healthy)


def due(every: int, step: int) -> bool:
    """Whether something that happens ``every`` so many steps does after ``step``; 0 is never."""
    return bool(every) and step % every == 0


def export_folder(run_dir: str, role: str) -> Path:
    """Where the model of ``role`` goes at the end: ``export``, ``export_critic``."""
    return Path(run_dir) / ("export" if role == "policy" else f"export_{role}")


def _discard(folder: Path) -> None:
    """Delete ``folder``, which is whole or not there whenever this ends."""
    if folder.exists():
        part = folder.with_name(f"{folder.name}.part")
        with writing(f"the export {folder}, which is older than the next checkpoint,"):
            shutil.rmtree(part, ignore_errors=True)
            folder.rename(part)
            shutil.rmtree(part)
