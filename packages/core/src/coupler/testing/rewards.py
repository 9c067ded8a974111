"""Define a reward function under test, and the texts that a model may write."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coupler.config.schema import RewardConfig
from coupler.errors import ConfigError
from coupler.rewards import check_reward
from coupler.rewards.result import Scored
from coupler.testing.subject import parse_settings

MOST_ROWS = 8
LONG = 100_000  # characters
ROWS: tuple[dict[str, Any], ...] = (
    {"prompt": "What is 6 * 7?", "answer": "42"},
    {"prompt": "Say it in Greek.", "answer": "Σαράντα δύο 🎉"},
    {"prompt": "", "answer": ""},
)
COMPLETIONS: dict[str, str] = {  # by what they are, for the message of a failure
    "empty": "",
    "blank": " \n\t\r\x00 ",
    "the answer of the first row": "42",
    "a sentence with it": "The answer is 42.",
    "tags": "<think>6 * 7 = 42</think><answer>42</answer>",
    "open tags": "<answer><answer>4</answer",
    "a box": r"so \boxed{\frac{84}{2}} and \boxed{",
    "code": "```python\nraise SystemExit(3)\n```",
    "numbers that are none": "nan inf -inf 1e999 0x2a 4_2 ٤٢ ²",
    "unicode": "Σαράντα δύο 🎉 \u202e\u0301 \ufffd שלום",
    "JSON": '{"answer": [null, {"answer": 1e400}]}',
    "many digits": "9" * LONG,
    "many blanks": "a" + " " * LONG + "b",
    "many brackets": "(" * LONG,
    "many lines": "answer: 4\n" * (LONG // 10),
}

Call = tuple[str, str, dict[str, Any]]  # completion, answer, row


@dataclass(frozen=True, slots=True)
class RewardSubject:
    """One reward function, as tests get it."""

    target: str  # "package.module:function"
    rows: str = ""  # a .jsonl file with rows of its task; empty: the kit's
    timeout_s: float = RewardConfig.timeout_s

    @staticmethod
    def parse(named: str, common: list[str]) -> RewardSubject:
        """Read ``TARGET[,KEY=VALUE]...``, upon settings that ``--coupler-set`` gave.

        Raises:
            ConfigError: there is no such setting.
        """
        target, comma, own = named.partition(",")
        words = [f"reward.{word}" for word in own.split(",")] if comma else []
        given = {
            **parse_settings(common).get("reward", {}),
            **parse_settings(words).get("reward", {}),
        }
        if unknown := sorted(given.keys() - {"rows", "timeout_s"}):
            raise ConfigError(
                f"--coupler reward=... has no setting {unknown[0]!r}.\n  it has:  rows, timeout_s"
            )
        return replace(RewardSubject(target), **given)

    def __str__(self) -> str:
        return f"reward={self.target}"

    def calls(self) -> dict[str, Call]:
        """Return every completion on every row, and the row's own answer, by name."""
        rows = ROWS
        if self.rows:
            lines = Path(self.rows).read_text(encoding="utf-8").splitlines()[:MOST_ROWS]
            rows = tuple(json.loads(line) for line in lines)
        found: dict[str, Call] = {}
        for i, row in enumerate(rows):
            answer = str(row.get("answer", ""))
            texts = {**COMPLETIONS, "its answer": answer}
            found |= {f"{what}, row {i}": (text, answer, row) for what, text in texts.items()}
        return found

    def score(self, calls: dict[str, Call]) -> dict[str, Scored]:
        """Score them in a process of their own."""
        return dict(
            zip(calls, check_reward(self.target, calls.values(), self.timeout_s), strict=True)
        )
