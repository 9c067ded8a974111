"""Journal: the run folder and the trackers of one run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coupler.config.schema import RunConfig
from coupler.files import write_whole
from coupler.interfaces import Tracker
from coupler.manifest import describe_run
from coupler.metrics import Metrics, values
from coupler.plugins.manager import Plugins
from coupler.sampling import Scored


class Journal:
    """Owns the run folder: ``config.yaml``, ``run.json``, what the trackers write, samples, checkpoints, export."""

    def __init__(
        self, config: RunConfig, resolved: str, plugins: Plugins, facts: Mapping[str, Any], done: int = 0
    ) -> None:
        """Create the folder, or go on in it after step ``done``; ``run.json`` will hold ``facts`` too."""
        self.run_dir = Path(config.run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.resolved = resolved
        self.plugins, self.facts = plugins, facts
        self.total_steps = config.steps
        self.trackers: list[Tracker] = []
        for name in config.trackers:
            backend = plugins.get("tracker", name)
            self.trackers.append(backend.load()(backend.config(), self.run_dir))
            if (self.run_dir / "config.yaml").exists():
                self.trackers[-1].rewind(done or -1)

    def log(self, step: int, metrics: Metrics) -> dict[str, float]:
        numbers = values(metrics)
        if self.resolved:  # a run that fails before its first numbers leaves nothing that would refuse the next try
            write_whole(self.run_dir / "config.yaml", self.resolved)
            self._write_manifest()
            self.resolved = ""
        for tracker in self.trackers:
            tracker.log(step, {**numbers, "run/steps": float(self.total_steps)})
        self.plugins.call("coupler_step_end", step=step, values=numbers)
        return numbers

    def _write_manifest(self) -> None:
        """Add this start to ``run.json``: one object per start of the run."""
        path = self.run_dir / "run.json"
        starts = json.loads(path.read_text()) if path.exists() else []
        write_whole(path, json.dumps([*starts, {**describe_run(), **self.facts}], indent=2))

    def write_samples(self, name: str, scored: Iterable[Scored], decode: Callable[[Sequence[int]], str]) -> None:
        """Write every scored completion as one JSON object a line."""
        with (self.run_dir / name).open("w", encoding="utf-8") as file:
            for sample in scored:
                line = {
                    "row": sample.prompt.row.index,
                    "answer": sample.prompt.row.answer,
                    "completion": decode(sample.completion.tokens),
                    "reward": sample.reward,
                    **({"read": sample.answer} if sample.answer is not None else {}),
                    "finish": sample.completion.finish,
                }
                file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()
