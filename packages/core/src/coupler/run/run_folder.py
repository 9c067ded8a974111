"""Journal: the run folder and the trackers of one run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

from coupler.config.effect import not_default
from coupler.config.schema import RunConfig
from coupler.interfaces import Tracker
from coupler.loop.sampler import Scored
from coupler.metrics import Metrics, values
from coupler.plugins.manager import Plugins
from coupler.run.format import FORMAT, KEY, check_format
from coupler.run.provenance import describe_run
from coupler.system.files import write_whole, writing

NOT_DEFAULT = "not_default"  # key of run.json: options whose values were not the defaults of that release


class Journal:
    """Owns the run folder: ``config.yaml``, ``run.json``, what the trackers write, samples, checkpoints, export."""

    def __init__(
        self,
        config: RunConfig,
        resolved: str,
        plugins: Plugins,
        facts: Mapping[str, Any],
        code: Mapping[str, Path],
        done: int = 0,
    ) -> None:
        """Go on after step ``done`` in a folder that is there.

        Args:
            facts: what ``run.json`` will hold too.
            code: see :func:`describe_run`.
        """
        self.run_dir = Path(config.run_dir)
        self.resolved = resolved
        self.plugins, self.facts, self.code = plugins, facts, code
        self.not_default = not_default(config)
        self.total_steps = config.steps
        self.trackers: dict[str, Tracker] = {}
        for name in config.trackers:
            backend = plugins.get("tracker", name)
            with self._tracking(name):
                self.trackers[name] = backend.load()(backend.config(), self.run_dir)
                if (self.run_dir / "config.yaml").exists():
                    self.trackers[name].rewind(done or -1)

    def log(self, step: int, metrics: Metrics) -> dict[str, float]:
        numbers = values(metrics)
        if self.resolved:  # a run that fails before its first numbers leaves nothing that would refuse the next try
            with writing(f"what {self.run_dir} says of the run"):
                write_whole(self.run_dir / "config.yaml", self.resolved)
                self._write_manifest()
            self.resolved = ""
        for name, tracker in self.trackers.items():
            with self._tracking(name):
                tracker.log(step, {**numbers, "run/steps": float(self.total_steps)})
        self.plugins.call("coupler_step_end", step=step, values=numbers)
        return numbers

    def _write_manifest(self) -> None:
        """Add this start to ``run.json``: one object per start of the run."""
        path = self.run_dir / "run.json"
        about = {KEY: FORMAT, **describe_run(self.code), NOT_DEFAULT: self.not_default, **self.facts}
        write_whole(path, json.dumps([*read_starts(self.run_dir), about], indent=2))

    def write_samples(self, name: str, scored: Iterable[Scored], decode: Callable[[Sequence[int]], str]) -> None:
        """Write every scored completion as one JSON object a line."""
        path = self.run_dir / name
        with writing(f"the samples {path}"), path.open("w", encoding="utf-8") as file:
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

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close every tracker; where the run has failed already, its failure is the one to show."""
        with suppress(Exception) if kind else nullcontext(), ExitStack() as closing:
            for name, tracker in self.trackers.items():
                closing.callback(self._close, name, tracker)

    def _close(self, name: str, tracker: Tracker) -> None:
        with self._tracking(name):
            tracker.close()

    def _tracking(self, name: str) -> AbstractContextManager[None]:
        return writing(f"the numbers of tracker {name} in {self.run_dir}")


def read_starts(run_dir: Path) -> list[dict[str, Any]]:
    """What ``run.json`` says of each start of the run in ``run_dir``; nothing where there is none.

    Raises:
        CouplerError: a newer release wrote it, in a format that this one does not know.
    """
    path = run_dir / "run.json"
    starts = json.loads(path.read_text()) if path.exists() else []
    for start in starts:
        check_format(start, path)
    return starts
