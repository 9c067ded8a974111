"""Make runs on the toy backends, which the generators of faults copy and damage."""

from __future__ import annotations

import contextlib
import io
import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.faults.commands import HEAVY

from coupler.cli import main
from coupler.testing.models import write_tokenizer, write_toy

LIMIT_S = 300
REWARD = "def score(completion):\n    return len(set(completion)) / (1 + len(completion))\n"
OPTIONS = (
    "engine=toy",
    "engine.lr=0.1",
    "rollout=toy",
    "algorithm=toy",
    "data.max_prompt_tokens=64",
    "checkpoint.every_steps=1",
    "checkpoint.keep_last=0",
    "prompts_per_step=2",
    "samples_per_prompt=2",
    "sampling.max_tokens=4",
    "record.every_steps=1",
    "trackers=[jsonl]",
    "reward.num_workers=1",
    "deterministic=true",
)


class TookTooLong(BaseException):
    """Ends a command that hangs."""


@dataclass(frozen=True, slots=True)
class Said:
    """Holds what one command did."""

    code: int | None
    text: str
    raised: str

    @property
    def is_answered(self) -> bool:
        """Tell whether the command went well, or ended in a sentence."""
        return not self.raised and self.code in (0, 2) and "Traceback" not in self.text


def write_inputs(folder: Path) -> None:
    """Write the model, the rows and the reward of a toy run."""
    folder.mkdir(parents=True, exist_ok=True)
    write_toy(folder / "toy")
    write_tokenizer(folder / "toy")
    rows = [{"prompt": f"what is {i} + 2 ?", "answer": str(i + 2)} for i in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)


def arguments(inputs: Path, run_dir: Path, *more: str) -> list[str]:
    """Return the command line of a toy run."""
    return [
        "train",
        *OPTIONS,
        f"model.path={inputs / 'toy'}",
        f"data.source={inputs / 'rows.jsonl'}",
        f"reward.target={inputs / 'reward.py'}:score",
        f"run_dir={run_dir}",
        *more,
    ]


def call(given: list[str]) -> Said:
    """Run a command in this process, and return what it did."""
    # What takes long to import is no part of the limit.
    for name in HEAVY:
        import_module(name)
    output = io.StringIO()
    code, raised = None, ""
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), _limited():
        try:
            code = main(given)
        except TookTooLong:
            raised = "it hangs"
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException as error:
            raised = f"{type(error).__name__}: {error}"
    return Said(code, output.getvalue(), raised)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def steps(run_dir: Path) -> list[dict[str, Any]]:
    """Return the numbers of every step, without those that a clock measured."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [
        {
            key: value
            for key, value in json.loads(line).items()
            if not key.startswith(("time/", "memory/")) and key != "run/steps"
        }
        for line in lines
    ]
