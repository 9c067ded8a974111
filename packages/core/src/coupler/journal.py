"""Journal: the run folder and the trackers of one run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from coupler.config.schema import RunConfig
from coupler.errors import ConfigError
from coupler.interfaces import Tracker
from coupler.metrics import Metrics, values
from coupler.plugins.manager import Plugins
from coupler.sampling import Scored


class Journal:
    """Owns the run folder: ``config.yaml``, what the trackers write, ``samples.jsonl``, checkpoints, export."""

    def __init__(self, config: RunConfig, resolved: str, plugins: Plugins) -> None:
        """Create the folder.

        Raises:
            ConfigError: it holds another run already.
        """
        self.run_dir = Path(config.run_dir)
        if (self.run_dir / "config.yaml").exists():
            raise ConfigError(
                f"run_dir={config.run_dir} holds a run already; nothing in it was touched.\n"
                "  try:  another run_dir, or move that folder away"
            )
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.resolved = resolved
        self.plugins = plugins
        self.total_steps = config.steps
        self.trackers: list[Tracker] = []
        for name in config.trackers:
            backend = plugins.get("tracker", name)
            self.trackers.append(backend.load()(backend.config(), self.run_dir))

    def log(self, step: int, metrics: Metrics) -> dict[str, float]:
        numbers = values(metrics)
        if self.resolved:  # a run that fails before its first numbers leaves nothing that would refuse the next try
            (self.run_dir / "config.yaml").write_text(self.resolved)
            self.resolved = ""
        for tracker in self.trackers:
            tracker.log(step, {**numbers, "run/steps": float(self.total_steps)})
        self.plugins.hook.coupler_step_end(step=step, values=numbers)
        return numbers

    def write_samples(self, name: str, scored: Iterable[Scored], decode: Callable[[Sequence[int]], str]) -> None:
        """Write every scored completion as one JSON object a line."""
        with (self.run_dir / name).open("w", encoding="utf-8") as file:
            for sample in scored:
                line = {
                    "row": sample.prompt.row.index,
                    "answer": sample.prompt.row.answer,
                    "completion": decode(sample.completion.tokens),
                    "reward": sample.reward,
                    "finish": sample.completion.finish,
                }
                file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()
