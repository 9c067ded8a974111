"""Keep the numbers that a library was given, to give them again where a run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class Kept:
    """Appends one JSON object a step to a file, and flushes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([step, dict(values)]) + "\n")

    def rewind(self, step: int) -> list[tuple[int, dict[str, float]]]:
        """Drop the steps after ``step``, and return the others.

        A last line that a kill cut off is dropped too.
        """
        if not self.path.is_file():
            return []

        found = [line for line in self._lines() if line[0] <= step]

        part = self.path.with_name(f"{self.path.name}.part")
        part.write_text("".join(json.dumps(line) + "\n" for line in found), encoding="utf-8")
        part.replace(self.path)
        return found

    def _lines(self) -> Iterator[tuple[int, dict[str, float]]]:
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                step, values = json.loads(line)
            except (ValueError, RecursionError):
                continue
            yield step, values


def samples_until(run_dir: Path, step: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield the samples of the steps up to ``step`` that lie in the folder of a run."""
    found = {path: path.stem.removeprefix("step_") for path in run_dir.glob("samples/step_*.jsonl")}
    steps = sorted((int(number), path) for path, number in found.items() if number.isdigit())
    for number, path in steps:
        if number <= step:
            lines = path.read_text(encoding="utf-8").splitlines()
            yield number, [json.loads(line) for line in lines]
