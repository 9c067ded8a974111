"""``trackers=[wandb]``: Weights & Biases."""

from __future__ import annotations

import os
import shutil

from coupler_trackers.config import WandbConfig, WandbMode
from coupler_trackers.library import LiveTracker


class WandbTracker(LiveTracker):
    """Sends a run to Weights & Biases, or writes it to ``wandb/`` of the run folder.

    The id there is that of the run, so that a run that goes on continues its curve. The
    server keeps the first numbers that it had of a step.
    """

    library = "wandb"
    config: WandbConfig

    def in_files(self) -> bool:
        return self.config.mode is WandbMode.OFFLINE

    def forget(self) -> None:
        for folder in (self.run_dir / "wandb").glob(f"offline-run-*-{self.run or '*'}"):
            shutil.rmtree(folder)

    def rewind(self, step: int) -> int:
        """Return the last step that the server has, which counts where it is online."""
        last = super().rewind(step)
        if self.in_files():
            return last
        with self._open():
            return min(last, self.live.starting_step - 1)

    def open(self) -> None:
        os.environ.setdefault("WANDB_CACHE_DIR", str(self.run_dir / "wandb" / "cache"))
        wandb, given = self.imported(), self.config
        settings = wandb.Settings(console="off", silent=True, disable_git=True, save_code=False)

        self.live = wandb.init(
            project=given.project,
            entity=given.entity or None,
            name=self.title,
            group=given.group or None,
            tags=given.tags or None,
            mode=str(given.mode),
            id=self.run or None,
            resume="allow",
            dir=str(self.run_dir),
            config=self.resolved,
            settings=settings,
            reinit="create_new",
        )

    def finish(self, how: str) -> None:
        self.live.summary["ended"] = how
        self.live.finish(exit_code=0 if how == "done" else 1)
        self.opened = False
