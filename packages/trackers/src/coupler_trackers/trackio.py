"""``trackers=[trackio]``: a database of Trackio, or a Space of Hugging Face."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from coupler_trackers.config import TrackioConfig
from coupler_trackers.library import LiveTracker


class TrackioTracker(LiveTracker):
    """Writes to ``trackio/`` of the run folder, for ``trackio show``."""

    library = "trackio"
    config: TrackioConfig
    module: Any = None

    @property
    def folder(self) -> Path:
        return Path(self.config.folder or self.run_dir / "trackio").expanduser()

    @property
    def title(self) -> str:
        """A name of this run alone, since Trackio knows runs by it."""
        return self.config.run_name or f"{self.run_dir.resolve().name}-{self.run[:8]}"

    def imported(self) -> Any:
        """Import the library, which takes its folder at that moment, anew."""
        if self.module is None:
            for name in [each for each in sys.modules if each.partition(".")[0] == self.library]:
                del sys.modules[name]
            os.environ["TRACKIO_DIR"] = str(self.folder)
            self.module = import_module(self.library)
        return self.module

    def in_files(self) -> bool:
        return not self.config.space

    def forget(self) -> None:
        self.imported()
        storage = import_module("trackio.sqlite_storage").SQLiteStorage
        storage.delete_run(self.config.project, self.title)

    def open(self) -> None:
        self.live = self.imported().init(
            project=self.config.project,
            name=self.title,
            space_id=self.config.space or None,
            config=self.resolved,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def finish(self, how: str) -> None:
        level = {"done": "info", "interrupted": "warn"}.get(how, "error")
        self.live.alert("the run ended", how, self.imported().AlertLevel(level), step=self.step)
