"""``trackers=[swanlab]``: SwanLab."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coupler_trackers.config import SwanlabConfig, SwanlabMode
from coupler_trackers.library import COLUMNS, LiveTracker, table


class SwanlabTracker(LiveTracker):
    """Sends a run to SwanLab, or writes it to ``swanlab/`` of the run folder.

    The id there is that of the run, so that a run that goes on continues its curve.
    """

    library = "swanlab"
    config: SwanlabConfig

    @property
    def folder(self) -> Path:
        return self.run_dir / "swanlab"

    def in_files(self) -> bool:
        return self.config.mode is SwanlabMode.OFFLINE

    def forget(self) -> None:
        for folder in self.folder.glob("run-*"):
            shutil.rmtree(folder)

    def open(self) -> None:
        swanlab, given = self.imported(), self.config

        self.live = swanlab.init(
            project=given.project,
            workspace=given.workspace or None,
            name=self.title,
            tags=given.tags or None,
            mode=str(given.mode),
            id=self.run or None,
            resume="allow",
            log_dir=str(self.folder),
            config=self.resolved,
            # To list packages it may run uv, which writes outside the run's folder.
            settings=swanlab.Settings(interactive=False, probe={"requirements": False}),
            reinit=True,
        )

    def give(self, step: int, values: Mapping[str, float]) -> None:
        named = {name or "unnamed": value for name, value in values.items()}
        self.live.log(named, step=step)

    def give_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        shown = self.imported().echarts.Table()
        shown.add(list(COLUMNS), table(rows))
        self.live.log({"samples": shown}, step=step)

    def finish(self, how: str) -> None:
        states = {"done": "success", "interrupted": "aborted"}
        state = states.get(how, "crashed")
        self.live.finish(state=state, error=how if state == "crashed" else None)
        self.opened = False
