"""Print one line a step, with a live count below it where a person watches."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from coupler.interfaces import Tracker
from coupler.system import phases

COLUMNS = (  # metric, heading, format; a narrow terminal shows those that fit
    ("reward/mean", "reward", "{:.3f}"),
    ("loss", "loss", "{:.4f}"),
    ("eval/reward", "eval", "{:.3f}"),
    ("eval/loss", "eval loss", "{:.4f}"),
    ("train_infer/kl", "KL(train,infer)", "{:.1e}"),
    ("entropy", "entropy", "{:.3f}"),
    ("time/tokens_per_second", "tokens/s", "{:.0f}"),
    ("train/grad_norm", "grad norm", "{:.3f}"),
    ("train/lr", "lr", "{:.1e}"),
)
# a policy loss says nothing, and a supervised loss is the number to see
HIDDEN_WITH = {"loss": "reward/mean"}


class ConsoleTracker(Tracker):
    """Prints ``step   12  reward 0.431  KL(train,infer) 2.1e-07  entropy 0.912``.

    A terminal shows below it the step, the phase of the step and the time that is left.
    """

    def __init__(self, config: Any, run_dir: Path) -> None:
        super().__init__(config, run_dir)
        self.console = Console(highlight=False, soft_wrap=True)

        self.progress = Progress(
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            _Phase(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task("", total=None)
        self.progress.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.progress.update(self.task, total=values.get("run/steps"), completed=step)

        shown = [
            (heading, form.format(values[name]))
            for name, heading, form in COLUMNS
            if name in values and HIDDEN_WITH.get(name) not in values
        ]
        # A pipe that went away stops no run. Rich would end the process.
        with suppress(OSError, SystemExit):
            if shown:
                self.console.print(self._line(f"step {step:>4}", shown))

    def _line(self, line: str, shown: Sequence[tuple[str, str]]) -> str:
        """Put behind ``line`` what fits the terminal. All of it fits a pipe."""
        room = self.console.width - len(line) if self.console.is_terminal else sys.maxsize

        for heading, value in shown:
            room -= len(f"  {heading} {value}")
            if room >= 0:
                line += f"  {heading} [bold]{value}[/bold]"
        return line

    def close(self) -> None:
        self.progress.stop()


class _Phase(ProgressColumn):
    """Shows what the run does now, as the phases of ``memory/PHASE/...`` are called."""

    def render(self, task: Task) -> Text:
        return Text(phases.now().replace("_", " "), "dim", overflow="ellipsis", no_wrap=True)
