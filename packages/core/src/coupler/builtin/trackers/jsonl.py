"""Write one JSON object a step, to ``metrics.jsonl`` of the run folder."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coupler.interfaces import Tracker
from coupler.system.files import check_writable, json_line, read_bytes, set_aside, write_whole
from coupler.system.log import get_logger

MAX_BYTES = 4 << 30

log = get_logger(__name__)


class JsonlTracker(Tracker):
    """Appends, and flushes every line, so that a killed run keeps what it had.

    A number that is not finite is written as null.
    """

    def __init__(self, config: Any, run_dir: Path) -> None:
        super().__init__(config, run_dir)
        self.path = run_dir / "metrics.jsonl"
        check_writable(self.path)
        self.file = self.path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        line = {"step": step, **{k: v if math.isfinite(v) else None for k, v in values.items()}}
        self.file.write(json.dumps(line, allow_nan=False) + "\n")
        self.file.flush()

    def rewind(self, step: int) -> None:
        """Keep the lines of steps up to ``step``.

        A last line that a kill cut off goes. Where other lines are damaged, the whole
        file is kept beside the new one, and the lines are named. So are steps whose
        line is missing, and those that have several, of which the last is kept.
        """
        self.file.close()
        lines = read_bytes(self.path, MAX_BYTES).split(b"\n")
        steps = [_step_of(line) for line in lines]
        damaged = [i + 1 for i, found in enumerate(steps[:-1]) if found is None]
        kept = {
            found: line.decode()
            for line, found in zip(lines, steps, strict=True)
            if found is not None and found <= step
        }
        repeated = [
            found for found, number in Counter(steps).items() if found in kept and number > 1
        ]

        if damaged:
            aside = set_aside(self.path)
            log.warning(
                f"{self.path}: {_some('line', damaged)} damaged; the file is kept as {aside}"
            )
        elif lines[-1] and steps[-1] is None:
            log.info(f"{self.path}: the last line was not written to its end")
        if repeated:
            log.warning(
                f"{self.path}: {_some('step', repeated)} there more than once; the last line of "
                "each is kept"
            )
        write_whole(self.path, "".join(f"{line}\n" for line in kept.values()))
        self._warn_of_missing(step, {found for found in steps if found is not None})
        self.file = self.path.open("a", encoding="utf-8")

    def _warn_of_missing(self, step: int, found: set[int]) -> None:
        before = [number for number in found if number <= step]
        if step < 1 or len(before) == step - min(before, default=0) + 1:
            return

        start = min(before, default=1)
        missing = [number for number in range(start, step + 1) if number not in found]
        if missing:
            log.warning(f"{self.path} has no numbers of {_some('step', missing)} kept by the run")

    def close(self) -> None:
        self.file.close()


def _some(noun: str, numbers: list[int]) -> str:
    """Write ``line 3 is`` or ``lines 3, 5 and 7 more are``."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}, which is"
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"{noun}s {', '.join(map(str, numbers[:8]))}{more}, which are"


def _step_of(line: bytes) -> int | None:
    """Return the step of a line, or None where it is no line of ours."""
    step = (json_line(line) or {}).get("step")
    return step if type(step) is int else None
