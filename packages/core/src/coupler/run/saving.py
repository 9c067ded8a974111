"""Make checkpoints after the steps that are due, and after the last one."""

from __future__ import annotations

import gc
import os
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
from coupler.system.archives import check_tensors
from coupler.system.files import DamagedFile, read_json, remove, writing


class Resumable(Protocol):
    """Names what checkpoints need of a trainer."""

    @property
    def healthy(self) -> bool: ...

    def state(self) -> State: ...

    def restore(self, state: State, *, reset_data: bool = False) -> None: ...

    def start_at(self, step: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Saving:
    """Logs each step, and saves the trained ``roles`` and the trainer when due."""

    config: RunConfig
    checkpoints: Checkpoints
    roles: Mapping[str, EngineGroup]
    trainer: Resumable
    log: Callable[[int, Metrics], Awaitable[Mapping[str, float]]]
    # The state of a role is on its device within this context.
    hold: Callable[[str], AbstractAsyncContextManager[Any]]
    # Tells of other steps that are due.
    also: Callable[[int], bool] = lambda _: False

    async def after(self, step: int, metrics: Metrics) -> None:
        """Log, save if due, and free what the step left in cycles.

        It raises what made the last save fail, at the first step after it.
        """
        values = await self.log(step, metrics)
        gc.collect()
        if self.checkpoints.ended:
            await self.checkpoints.settle()
        last = step == self.config.steps
        wanted = last or due(self.config.checkpoint.every_steps, step) or self.also(step)
        if not step or not wanted:
            return

        # An old export goes before there is a checkpoint that would make a run with it
        # complete.
        for role in self.roles:
            _discard(export_folder(self.config.run_dir, role))

        await self.checkpoints.save(
            step,
            self.roles,
            self.trainer.state(),
            hold=self.hold,
            values=values,
            healthy=self.trainer.healthy,
        )


def due(every: int, step: int) -> bool:
    """Tell whether something that happens every so many steps does after ``step``.

    Args:
        every: the number of steps. 0 is never.
    """
    return bool(every) and step % every == 0


def epoch_due(every: int, step: int, rows_per_step: int, num_rows: int) -> bool:
    """Tell whether ``step`` is the first after which so many epochs are complete.

    Args:
        every: the number of epochs, or a multiple of it. 0 is never.
        num_rows: rows of an epoch.
    """
    now, before = (steps * rows_per_step // num_rows for steps in (step, step - 1))
    return bool(every) and step > 0 and now // every > before // every


def export_folder(run_dir: str, role: str) -> Path:
    """Return the folder for the model of ``role``: ``export`` or ``export_critic``."""
    return Path(run_dir) / ("export" if role == "policy" else f"export_{role}")


def export_problem(folder: Path) -> str:
    """Return what is wrong with an exported model, or an empty text.

    The sizes of its weights are compared with their headers. No weight is read.
    """
    if not folder.is_dir():
        return f"{folder} is missing" if not folder.exists() else f"{folder} is no folder"

    weights = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    try:
        read_json(folder / "config.json")
        if index.exists():
            named = read_json(index).get("weight_map")
            names = {*named.values()} if isinstance(named, dict) else {"weight_map"}
            weights = [folder / str(name) for name in sorted(names, key=str)]
        for path in weights:
            check_tensors(path)
    except DamagedFile as error:
        return str(error).removesuffix(".")
    return "" if weights else f"{folder} holds no weights"


def _discard(folder: Path) -> None:
    """Delete ``folder`` so that it is whole or absent, whenever this ends."""
    if os.path.lexists(folder):
        part = folder.with_name(f"{folder.name}.part")
        with writing(f"the export {folder}, which is older than the next checkpoint,"):
            remove(part)
            folder.rename(part)
            remove(part)
