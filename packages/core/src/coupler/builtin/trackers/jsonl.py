"""One JSON object a step, in ``metrics.jsonl`` of the run folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coupler.interfaces import Tracker
from coupler.system.files import write_whole


class JsonlTracker(Tracker):
    """Appends, and flushes every line, so that a killed run keeps what it had. A non-finite number is null."""

    def __init__(self, config: Any, run_dir: Path) -> None:
        super().__init__(config, run_dir)
        self.file = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        line = {"step": step, **{k: v if math.isfinite(v) else None for k, v in values.items()}}
        self.file.write(json.dumps(line, allow_nan=False) + "\n")
        self.file.flush()

    def rewind(self, step: int) -> None:
        """Keep the lines of steps up to ``step``; one that a killed run left unfinished goes too."""
        self.file.close()
        path = Path(self.file.name)
        kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
        write_whole(path, "".join(f"{line}\n" for line in kept))
        self.file = path.open("a", encoding="utf-8")

    def close(self) -> None:
        self.file.close()


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except ValueError:
        return math.inf
