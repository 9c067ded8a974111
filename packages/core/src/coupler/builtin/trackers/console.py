"""Print one line a step, with a live count below it where a person watches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from coupler.interfaces import Tracker

COLUMNS = (  # metric, heading, format
    ("reward/mean", "reward", "{:.3f}"),
    ("loss", "loss", "{:.4f}"),
    ("train_infer/kl", "KL(train,infer)", "{:.1e}"),
    ("entropy", "entropy", "{:.3f}"),
    ("train/grad_norm", "grad norm", "{:.3f}"),
    ("train/lr", "lr", "{:.1e}"),
    ("time/tokens_per_second", "tokens/s", "{:.0f}"),
    ("eval/reward", "eval", "{:.3f}"),
    ("eval/loss", "eval loss", "{:.4f}"),
)
# a policy loss says nothing, and a supervised loss is the number to see
HIDDEN_WITH = {"loss": "reward/mean"}


class ConsoleTracker(Tracker):
    """Prints ``step 12  reward 0.431  KL(train,infer) 2.1e-07  entropy 0.912  grad norm
    0.413  tokens/s 8123``.
    """

    def __init__(self, config: Any, run_dir: Path) -> None:
        super().__init__(config, run_dir)
        self.console = Console(highlight=False, soft_wrap=True)

        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )

        self.task: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self.task is None:
            total = values.get("run/steps")
            self.task = self.progress.add_task(self.run_dir.name, total=total)
            self.progress.start()

        self.progress.update(self.task, completed=step)

        shown = [
            f"{heading} [bold]{form.format(values[name])}[/bold]"
            for name, heading, form in COLUMNS
            if name in values and HIDDEN_WITH.get(name) not in values
        ]
        if shown:
            self.console.print(f"step {step:>4}  " + "  ".join(shown))

    def close(self) -> None:
        self.progress.stop()
