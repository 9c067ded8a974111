"""Keep what the policy wrote in a step as text, in ``samples/step_12.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from coupler.batch import Batch
from coupler.batch.trajectory import TRAINED
from coupler.conversation.packing import PARTS, ended_of, stretches
from coupler.errors import CouplerError
from coupler.run.format import number_of
from coupler.run.saving import due
from coupler.system.files import DamagedFile, read_text, reading, remove, write_whole, writing
from coupler.system.log import PLAIN, get_logger
from coupler.system.terminal import WIDTH, cut, harmless

log = get_logger(__name__)

FOLDER, SHOWN = "samples", 2
# The keys that every line has.
KEYS = frozenset({"group", "trajectory", "reward", "finish", "turns"})


@dataclass(frozen=True, slots=True)
class SampleWriter:
    """Writes the samples of step 1 and of every so many steps, one JSON object a line.

    Attributes:
        folder: ``samples`` of the run.
        every_steps: 0 is never.
        max_groups: prompt groups of a step that are written.
        decode: makes text of token ids, special tokens included.
        sources: the data source of a row, by its number, where rows name theirs.
    """

    folder: Path
    every_steps: int
    max_groups: int
    decode: Callable[[Sequence[int]], str]
    sources: Mapping[int, str] = field(default_factory=dict)

    def forget_after(self, done: int) -> None:
        """Delete the files of steps after ``done``, which the run takes again."""
        with writing(f"the samples {self.folder}"):
            for step in steps(self.folder):
                if step > done:
                    remove(path_of(self.folder, step))

    def write(self, step: int, batch: Batch) -> list[dict[str, Any]]:
        """Write the samples of ``step`` where it is due, and log the first of them.

        Args:
            batch: what the step trained on, with rewards and advantages.

        Returns:
            what was written.

        Raises:
            CouplerError: the disk refuses the file.
        """
        if not self.every_steps or not (step == 1 or due(self.every_steps, step)):
            return []

        groups = np.unique(batch["group"])[: self.max_groups]
        lines = self.lines(step, batch, np.flatnonzero(np.isin(batch["group"], groups)).tolist())

        path = path_of(self.folder, step)
        with writing(f"the samples {path}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))
        for line in lines[:SHOWN]:
            log.info(brief(line), extra=PLAIN)
        return lines

    def lines(self, step: int, batch: Batch, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return what is written of some rows of a batch."""
        return [{"step": step, **self._line(batch.take([int(row)]))} for row in rows]

    def _line(self, one: Batch) -> dict[str, Any]:
        """Return what is written of a batch with one conversation."""
        turns = list(self._turns(one))
        sampled = (i for i, turn in enumerate(turns) if turn["origin"] in TRAINED)
        first = next(sampled, len(turns))
        mask, row = one["loss_mask"], int(one["row"][0])
        versions = one["version"][mask & (one["version"] >= 0)]

        return {
            "group": int(one["group"][0]),
            "trajectory": int(one["trajectory"][0]),
            "row": row,
            "data_source": self.sources.get(row),
            "prompt": "".join(turn["text"] for turn in turns[:first]),
            "completion": "".join(turn["text"] for turn in turns[first:]),
            "reward": float(one["reward"][0]),
            "reward_parts": {
                name.removeprefix(f"{PARTS}/"): float(column[0])
                for name, column in one.seqs.items()
                if name.startswith(f"{PARTS}/")
            },
            "advantage": _mean(one["advantages"][mask]) if one.has("advantages") else None,
            "finish": ended_of(one),
            "tokens": int(mask.sum()),
            "version": [int(versions.min()), int(versions.max())] if len(versions) else None,
            "turns": turns,
        }

    def _turns(self, one: Batch) -> Iterator[dict[str, str]]:
        """Yield the text of each stretch of tokens that have one origin."""
        for origin, tokens in stretches(one):
            text = self.decode(one["tokens"][tokens].tolist())
            yield {"origin": str(origin), "text": text}


def path_of(folder: Path, step: int) -> Path:
    """Return the file of a step's samples."""
    return folder / f"step_{step}.jsonl"


def steps(folder: Path) -> list[int]:
    """Return the steps whose samples are in ``folder``, in order."""
    folders = (path.with_suffix("") for path in folder.glob("step_*.jsonl"))
    return sorted(number for path in folders if (number := number_of(path)))


def read(folder: Path, step: int) -> list[dict[str, Any]]:
    """Return the samples of ``step``, in the order of their groups.

    Raises:
        CouplerError: there are none, or the file is damaged.
    """
    path = path_of(folder, step)
    if not path.exists():
        has = ", ".join(map(str, steps(folder))) or "none; set samples.every_steps"
        raise CouplerError(f"{folder.parent} has no samples of step {step}.\n  it has:  {has}")

    text = read_text(path)
    with reading(path):
        lines = [json.loads(line) for line in text.splitlines()]
    if any(not isinstance(line, dict) or KEYS - line.keys() for line in lines):
        raise DamagedFile(f"{path} is damaged: a line is no sample.")
    return lines


def brief(line: Mapping[str, Any]) -> str:
    """Return three lines of at most 80 columns: numbers, prompt and completion."""
    head = f"--- sample of step {line['step']}, reward {line['reward']:g}, ended: {line['finish']}"

    # The end of a prompt is the question, what precedes it is often the same.
    prompt = cut(harmless(line["prompt"])[::-1], WIDTH - 10)[::-1]
    completion = cut(harmless(line["completion"]), WIDTH - 10)
    return f"{cut(head)}\n  prompt  {prompt}\n  wrote   {completion}"


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
